"""SshKey over the wire: what is secret, whose files are touched, what a lost file does."""

from __future__ import annotations

import stat
import subprocess
from pathlib import Path

import grpc
import pytest

from mgpu.iac import tokens
from mgpu.iac.protocol.wire import UNKNOWN, from_struct
from mgpu.iac.types.ssh_key import SshKeyHandler

TOKEN = tokens.SSH_KEY


@pytest.fixture
def wire(serve):
    return serve({TOKEN: SshKeyHandler()})


@pytest.fixture
def here(at):
    return at(TOKEN)


def made(wire, here, **inputs):
    given = wire.inputs(here, inputs)
    answer = wire.create(here, given)
    return answer.id, given, answer.properties


def test_a_pair_is_made_in_the_state_folder(wire, here, xdg):
    resource_id, _, properties = made(wire, here)
    file = Path(from_struct(properties)["privateKeyFile"])
    assert file == xdg / "state/mgpu" / resource_id
    assert file.match("state/mgpu/keys/dev@*/id_ed25519")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    derived = subprocess.run(["ssh-keygen", "-y", "-f", file], capture_output=True, text=True, check=True).stdout
    assert derived.split()[:2] == from_struct(properties)["publicKey"].split()[:2]


def test_the_private_key_is_marked_secret_and_the_rest_is_not(wire, here):
    _, _, properties = made(wire, here)
    secret = {key for key, value in properties.fields.items() if value.HasField("struct_value")}
    assert secret == {"privateKey"}
    assert "1b47061264138c4ac30d75fd1eb44270" in str(properties.fields["privateKey"]), "the protocol's mark of a secret"


def test_read_marks_the_secret_again(wire, here):
    resource_id, inputs, properties = made(wire, here)
    again = wire.read(here, resource_id, from_struct(properties), inputs)
    assert again.properties.fields["privateKey"].HasField("struct_value")
    assert from_struct(again.properties) == from_struct(properties)
    assert from_struct(again.inputs) == inputs


def test_a_preview_makes_nothing(wire, here, xdg):
    answer = wire.create(here, wire.inputs(here, {}), preview=True)
    assert from_struct(answer.properties)["publicKey"] == UNKNOWN
    assert not (xdg / "state/mgpu/keys").exists()


def test_what_a_create_that_was_cut_off_wrote_is_taken_over(wire, here):
    _, inputs, first = made(wire, here)
    again = wire.create(here, inputs)
    assert from_struct(again.properties) == from_struct(first)


def test_a_key_of_the_users_is_never_taken_nor_overwritten(wire, here, tmp_path):
    file = tmp_path / "id_ed25519"
    file.write_text("mine")
    file.with_suffix(".pub").write_bytes("ssh-ed25519 AAAA jürgen@here\n".encode("latin-1"))
    with pytest.raises(grpc.RpcError) as refused:
        wire.create(here, wire.inputs(here, {"path": str(file)}))
    assert "exists already" in refused.value.details()
    assert file.read_text() == "mine"


def test_a_key_that_another_stack_made_is_not_taken_over(wire, at, tmp_path):
    path = {"path": str(tmp_path / "key")}
    wire.create(at(TOKEN), wire.inputs(at(TOKEN), path))
    with pytest.raises(grpc.RpcError, match="this stack did not make it"):
        wire.create(at(TOKEN, stack="other"), path)


def test_a_lost_file_is_seen_and_written_again_from_state(wire, here):
    resource_id, inputs, properties = made(wire, here)
    outputs = from_struct(properties)
    file = Path(outputs["privateKeyFile"])
    file.unlink()
    seen = from_struct(wire.read(here, resource_id, outputs, inputs).properties)
    assert seen["privateKeyFile"] == ""
    diff = wire.diff(here, inputs, seen, inputs)
    assert dict(diff.detailedDiff).keys() == {"privateKeyFile"}
    assert not diff.replaces
    updated = wire.update(here, resource_id, seen, inputs)
    assert updated == outputs
    assert file.read_text() == outputs["privateKey"]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_another_machine_writes_the_key_from_state_into_its_own_folder(serve, wire, here, xdg):
    resource_id, inputs, properties = made(wire, here)
    outputs = from_struct(properties)
    wire = serve({TOKEN: SshKeyHandler()}, stateDir=str(xdg / "theirs/mgpu"))
    assert wire.inputs(here, {}, inputs) == inputs
    seen = from_struct(wire.read(here, resource_id, outputs, inputs).properties)
    assert seen["privateKeyFile"] == ""
    assert not wire.diff(here, inputs, seen, inputs).replaces
    file = Path(wire.update(here, resource_id, seen, inputs)["privateKeyFile"])
    assert file == xdg / "theirs/mgpu" / resource_id
    assert file.read_text() == outputs["privateKey"]


def test_another_backends_stack_of_this_name_has_a_key_of_its_own(serve, wire, here):
    first, _, ours = made(wire, here)
    other = serve({TOKEN: SshKeyHandler()}, owner="o-of-the-team")
    second, _, theirs = made(other, here)
    assert from_struct(ours)["privateKey"] != from_struct(theirs)["privateKey"]
    other.delete(here, second, from_struct(theirs))
    assert Path(from_struct(ours)["privateKeyFile"]).exists()
    assert first != second


def test_a_key_that_exists_stays_where_it_is(wire, here):
    before = {"path": "keys/dev/id_ed25519"}
    assert wire.inputs(here, {}, before) == before


def test_the_same_inputs_are_no_change(wire, here):
    _, inputs, properties = made(wire, here)
    diff = wire.diff(here, inputs, from_struct(properties), wire.inputs(here, {}, inputs))
    assert diff.changes == diff.DIFF_NONE


def test_another_path_is_another_key(wire, here, tmp_path):
    _, inputs, properties = made(wire, here)
    diff = wire.diff(here, inputs, from_struct(properties), {"path": str(tmp_path / "key")})
    assert list(diff.replaces) == ["path"]


def test_delete_removes_both_files_and_the_folder(wire, here, xdg):
    resource_id, _, properties = made(wire, here)
    wire.delete(here, resource_id, from_struct(properties))
    assert not list((xdg / "state/mgpu/keys").iterdir())
    wire.delete(here, resource_id, from_struct(properties))  # absent is success


def test_delete_leaves_a_file_that_was_put_in_its_place(wire, here):
    resource_id, _, properties = made(wire, here)
    file = Path(from_struct(properties)["privateKeyFile"])
    file.write_text("another key")
    wire.delete(here, resource_id, from_struct(properties))
    assert file.read_text() == "another key"


def test_import_reads_the_file(wire, here, tmp_path):
    resource_id, inputs, properties = made(wire, here, path=str(tmp_path / "key"))
    imported = wire.read(here, resource_id)
    assert imported.id == resource_id
    assert from_struct(imported.inputs) == inputs
    assert imported.properties.fields["privateKey"].HasField("struct_value")
    assert from_struct(imported.properties)["privateKey"] == from_struct(properties)["privateKey"]


def test_import_of_a_missing_id_answers_empty(wire, here, tmp_path):
    answer = wire.read(here, str(tmp_path / "nothing"))
    assert answer.id == ""
    assert not answer.properties.fields


def test_a_relative_path_is_refused(wire, here):
    failures = wire.check(here, {"path": "keys/id"}).failures
    assert [failure.property for failure in failures] == ["path"]


def test_an_empty_passphrase_is_refused(wire, here, monkeypatch):
    monkeypatch.setenv("PULUMI_CONFIG_PASSPHRASE", "")
    failures = wire.check(here, {}).failures
    assert "passphrase" in failures[0].reason
