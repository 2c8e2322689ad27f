"""The plug-in's start: what it takes of Pulumi's SDK, and what it leaves out."""

from __future__ import annotations

import subprocess
import sys

from pulumi.runtime import rpc

from mgpu.iac.protocol import wire

_SDK_IS_LEFT_OUT = """
import sys
from mgpu.iac import entry
entry.without_sdk()
import mgpu.iac.plugin
from mgpu.iac.protocol import servicer
assert servicer.provider_pb2.CreateRequest(preview=True).SerializeToString()
heavy = ("pulumi.resource", "pulumi.runtime.rpc", "pulumi.runtime.proto.analyzer_pb2", "opentelemetry", "dill", "boto3")
sys.exit(" ".join(name for name in heavy if name in sys.modules) or 0)
"""


def test_the_plugin_has_the_messages_without_the_sdk():
    done = subprocess.run([sys.executable, "-c", _SDK_IS_LEFT_OUT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"imported: {done.stderr}"


def test_what_is_not_known_yet_is_what_pulumi_calls_so():
    assert wire.UNKNOWN == rpc.UNKNOWN
