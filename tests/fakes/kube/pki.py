"""The certificates of a cluster: everybody in it is who a certificate says, signed by the cluster's own authority."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_DAY = datetime.timedelta(days=1)
_USES = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]


class Authority:
    """Signs, into a folder: `ca.crt`, and `<file>.crt` and `<file>.key` of each that it signs for."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self._folder, self._key = folder, ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tests")])
        builder = self._begun(self._name, self._key).add_extension(x509.BasicConstraints(True, None), critical=True)
        (folder / "ca.crt").write_bytes(_pem(builder.sign(self._key, hashes.SHA256())))

    def sign(self, file: str, user: str, group: str = "") -> None:
        """A certificate for a user, who may serve on loopback with it, too."""
        key = ec.generate_private_key(ec.SECP256R1())
        about = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group)] if group else []
        name = x509.Name([*about, x509.NameAttribute(NameOID.COMMON_NAME, user)])
        here = x509.SubjectAlternativeName(
            [x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("localhost")]
        )
        builder = self._begun(name, key).add_extension(here, critical=False)
        builder = builder.add_extension(x509.ExtendedKeyUsage(_USES), critical=False)
        (self._folder / f"{file}.crt").write_bytes(_pem(builder.sign(self._key, hashes.SHA256())))
        secret = self._folder / f"{file}.key"
        secret.touch(mode=0o600)
        plain = serialization.NoEncryption()
        secret.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain))

    def _begun(self, name: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateBuilder(self._name, name, key.public_key(), x509.random_serial_number())
        return builder.not_valid_before(now - _DAY).not_valid_after(now + _DAY)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
