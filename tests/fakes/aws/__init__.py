"""A fake AWS: moto in a process of its own, with what moto lacks, and Linux machines behind its instances.

with FakeAws.start(folder) as aws:
    aws.client("ec2").run_instances(...)
    assert aws.alive() == []
"""

from __future__ import annotations

from fakes.aws.fake import FOREIGN, Called, FakeAws, Row

__all__ = ["FOREIGN", "Called", "FakeAws", "Row"]
