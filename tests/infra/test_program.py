"""Our Pulumi program and its SDK under Pulumi's mocks: what is made of what, what is secret, what is exported."""

from __future__ import annotations

import asyncio
import json
import runpy
from dataclasses import fields
from pathlib import Path

import pulumi
import pytest
from pulumi.runtime.mocks import MockMonitor
from pydantic.alias_generators import to_camel

from mgpu.iac import resources, schema, tokens
from mgpu.iac.outputs import StackOutput

PROGRAM = Path(__file__).parents[2] / "infra" / "__main__.py"
MACHINES = [
    {
        "rank": rank,
        "id": f"i-{rank}",
        "address": "192.0.2.1",
        "port": 22,
        "user": "u",
        "hostKey": f"ssh-ed25519 {rank}",
        "privateAddress": "",
        "priceUsdPerHour": 0.03,
        "via": {"address": "192.0.2.9", "port": 22, "user": "j", "host_key": "ssh-ed25519 J"},
        "python": "/opt/pytorch/bin/python",
    }
    for rank in range(2)
]
BOUGHT = {
    "generation": 1,
    "handle": {"ids": ["i-0", "i-1"], "token": "t0", "made_at": 5e8},
    "machines": MACHINES,
    "offer": {"instance_type": "m1", "gpu": "H100"},
    "offersConsidered": [],
    "boughtAs": "spot",
    "region": "here",
    "priceUsdPerHour": 0.06,
    "hardCapAt": 1e9,
    "owner": "o-1",
}
PUBLISHED = {"reference": f"registry.example/a@sha256:{'a' * 64}", "tag": "mgpu-1", "digest": f"sha256:{'a' * 64}"}
PUBLISHED["labels"] = {"dev.mgpu.cuda": "13.0"}
KEY = {"publicKey": "ssh-ed25519 AAAA", "privateKey": "PRIVATE", "privateKeyFile": "/keys/id"}
RUN_FILE = {
    "name": "demo",
    "provider": "local",
    "nodes": 2,
    "market": "spot",
    "max_price_usd_per_hour": 0.2,
    "max_hours": 0.5,
    "local": {"python": "/opt/python"},
    "train": {"task": "lm"},
    "checkpoint": {"to": "s3://bucket/runs"},
}


class Mocks(pulumi.runtime.Mocks):
    def __init__(self) -> None:
        self.made: dict[str, pulumi.runtime.MockResourceArgs] = {}

    def new_resource(self, args):
        self.made[args.name] = args
        answers = {
            tokens.SSH_KEY: KEY,
            tokens.IMAGE: PUBLISHED,
            tokens.FLEET_GUARD: {"fleet": args.inputs.get("fleet", "kept")},
            tokens.FLEET: BOUGHT | {"gpusPerNode": 0, "leaseMinutes": 60},
        }
        return f"{args.name}-id", {**args.inputs, **answers.get(args.typ, {})}

    def call(self, args):
        return {}


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Runs infra/__main__.py on a run file; what was made, and what was exported."""
    mocks, exported = Mocks(), {}
    pulumi.runtime.set_mocks(mocks, project="mgpu", stack="dev")
    monkeypatch.setattr(pulumi, "export", exported.__setitem__)

    def run(folder=None, config=None, **changes):
        path = (tmp_path / "run.yaml") if folder is None else tmp_path / "record" / "mgpu.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(RUN_FILE | changes))
        own = {"mgpu:folder": str(folder)} if folder else {}
        pulumi.runtime.set_all_config({"mgpu:runFile": str(path), **own, **(config or {})})
        runpy.run_path(str(PROGRAM))
        return mocks.made, exported

    return run


def settled(output):
    """What an Output resolves to, and whether it is secret."""
    return asyncio.get_event_loop().run_until_complete(_settle(output))


async def _settle(output):
    return await output.future(), await output.is_secret()


def test_the_program_exports_what_a_run_reads(program):
    _, exported = program()
    value, secret = settled(exported["mgpu"])
    output = StackOutput.model_validate(value)
    assert value == output.model_dump(mode="json")
    assert not secret
    assert output.fleet == "kept", "what its guard sweeps by"
    assert [(node.id, node.host_key) for node in output.nodes] == [("i-0", "ssh-ed25519 0"), ("i-1", "ssh-ed25519 1")]
    assert (output.gpu, output.market, output.store) == ("H100", "spot", "s3://bucket/runs")
    assert (output.private_key_file, output.token, output.made_at) == ("/keys/id", "t0", 5e8)
    assert output.options == {"python": "/opt/python"}, "every later call of the provider needs them"
    assert {(node.via.address, node.via.host_key, node.python) for node in output.nodes if node.via} == {
        ("192.0.2.9", "ssh-ed25519 J", "/opt/pytorch/bin/python")
    }
    assert "PRIVATE" not in json.dumps(value)


def test_the_private_key_is_asked_to_be_secret_whatever_the_plugin_says(program, monkeypatch):
    asked = {}
    register = MockMonitor.RegisterResource

    def spy(self, request):
        asked[request.name] = list(request.additionalSecretOutputs)
        return register(self, request)

    monkeypatch.setattr(MockMonitor, "RegisterResource", spy)
    _, exported = program()
    settled(exported["mgpu"])
    assert asked["key"] == ["privateKey"]


def test_the_fleet_asks_for_what_the_run_file_says_and_no_more(program):
    made, exported = program()
    settled(exported["mgpu"])
    inputs = made["fleet"].inputs
    assert inputs["nodes"] == 2
    assert inputs["maxPriceUsdPerHour"] == 0.2
    assert inputs["options"] == {"python": "/opt/python"}
    assert inputs["stores"] == ["s3://bucket/runs"]
    assert (inputs["sshPublicKey"], inputs["sshPrivateKeyFile"]) == (KEY["publicKey"], KEY["privateKeyFile"])
    assert inputs.keys() <= schema.package()["resources"][tokens.FLEET]["inputProperties"].keys()


def test_every_fleet_has_its_guard_and_an_explicit_provider(program):
    made, exported = program()
    settled(exported["mgpu"])
    assert made["fleet-guard"].typ == tokens.FLEET_GUARD
    options = {"python": "/opt/python"}
    assert made["fleet-guard"].inputs == {"provider": "local", "options": options}
    assert all("mgpu-id" in made[name].provider for name in ("key", "fleet-guard", "fleet"))
    order = list(made)
    assert order.index("fleet-guard") < order.index("fleet")


def test_without_an_image_none_is_made_or_exported(program):
    made, exported = program()
    assert settled(exported["mgpu"])[0]["image"] is None
    assert "image" not in made


def test_an_image_is_exported_by_its_digest_and_nothing_is_rented_before_it_is_there(program, monkeypatch, tmp_path):
    waits = {}
    register = MockMonitor.RegisterResource

    def spy(self, request):
        waits[request.name] = [urn.rpartition("::")[2] for urn in request.dependencies]
        return register(self, request)

    monkeypatch.setattr(MockMonitor, "RegisterResource", spy)
    (tmp_path / "ca.pem").touch()
    given = {"repository": "registry.example/a", "args": {"BASE": "b:1", "ca_file": "mine"}, "secrets": ["TOKEN"]}
    made, exported = program(image=given | {"ca_file": "ca.pem"})
    assert settled(exported["mgpu"])[0]["image"] == PUBLISHED["reference"]
    assert "image" in waits["fleet"]
    assert made["fleet"].inputs["imageLabels"] == PUBLISHED["labels"]
    inputs = made["image"].inputs
    assert {key: inputs[key] for key in given} == given
    assert inputs["certificates"] == "ca.pem"
    assert (inputs["provider"], inputs["options"]) == ("local", {"python": "/opt/python"})
    assert Path(inputs["folder"]).resolve() == tmp_path.resolve()
    assert inputs.keys() <= schema.package()["resources"][tokens.IMAGE]["inputProperties"].keys()


def test_a_runs_own_copy_of_the_run_file_means_the_folder_of_the_users(program, tmp_path):
    (tmp_path / "ca.pem").touch()
    made, exported = program(folder=tmp_path, image={"repository": "registry.example/a", "ca_file": "ca.pem"})
    settled(exported["mgpu"])
    assert made["image"].inputs["folder"] == str(tmp_path)


@pytest.mark.parametrize(("config", "fleets"), [({}, "slurm"), ({"mgpu:provider": "local"}, "local")])
def test_of_several_providers_the_fleet_is_of_the_one_that_was_chosen(program, config, fleets):
    made, exported = program(provider=["slurm", "local"], config=config)
    settled(exported["mgpu"])
    assert made["fleet"].inputs["provider"] == fleets


def test_a_provider_that_the_run_file_does_not_name_is_refused(program):
    with pytest.raises(pulumi.RunError, match=r"mgpu:provider is aws.*: slurm, local"):
        program(provider=["slurm", "local"], config={"mgpu:provider": "aws"})


def test_runs_of_a_sweep_have_one_fleet_where_they_are_on_the_same_machines(program):
    made, exported = program(matrix={"env.SEED": ["a", "b"], "nodes": [2]})
    settled(exported["mgpu"])
    assert made["fleet"].inputs["nodes"] == 2
    with pytest.raises(pulumi.RunError, match="is a sweep\nIts `matrix` has runs on other machines"):
        program(matrix={"nodes": [1, 2]})


def test_a_run_file_with_mistakes_ends_the_program_without_a_traceback(program):
    with pytest.raises(pulumi.RunError, match="nodes"):
        program(nodes=0)


def test_without_checkpoints_no_store_is_exported(program):
    _, exported = program(checkpoint="none")
    assert settled(exported["mgpu"])[0]["store"] is None


def test_the_keys_of_a_users_map_are_not_renamed():
    assert resources.Fleet.translate_input_property(resources.Fleet, "subnet_ids") == "subnet_ids"
    assert resources.Fleet.translate_input_property(resources.Fleet, "gpus_per_node") == "gpusPerNode"


# ---- the hand-written SDK equals the schema


def _declared(cls):
    return {to_camel(name) for name in cls.__annotations__ if not name.startswith("_")}


def test_the_fleet_args_are_the_schemas_inputs():
    inputs = schema.package()["resources"][tokens.FLEET]
    given = {to_camel(field.name): field for field in fields(resources.FleetArgs)}
    assert (
        given.keys() | {"sshPublicKey", "sshPrivateKeyFile", "imageLabels", "image"} == inputs["inputProperties"].keys()
    )
    needed = {name for name, field in given.items() if field.default is not None}
    assert needed | {"sshPublicKey"} == set(inputs["requiredInputs"])


def test_the_image_args_are_the_schemas_inputs_and_its_outputs_the_schemas():
    image = schema.package()["resources"][tokens.IMAGE]
    given = {to_camel(field.name): field for field in fields(resources.ImageArgs)}
    assert given.keys() == image["inputProperties"].keys()
    assert {name for name, field in given.items() if field.default is not None} == set(image["requiredInputs"])
    assert _declared(resources.Image) <= image["properties"].keys()
    assert {to_camel(name) for name in resources.IMAGE_OUTPUTS} == image["properties"].keys() - given.keys()
    assert all(name == name.lower() for name in image["properties"]), "nothing is translated: `args` has a user's keys"


def test_the_fleets_outputs_are_the_schemas():
    properties = schema.package()["resources"][tokens.FLEET]["properties"].keys()
    inputs = schema.package()["resources"][tokens.FLEET]["inputProperties"].keys()
    assert {to_camel(name) for name in resources.FLEET_OUTPUTS} == properties - inputs
    assert _declared(resources.Fleet) - {"output"} == (properties - inputs) | {"nodes"}
    assert set(resources.Fleet._names.values()) >= properties


@pytest.mark.parametrize(("cls", "token"), [("SshKey", tokens.SSH_KEY), ("FleetGuard", tokens.FLEET_GUARD)])
def test_the_other_resources_have_the_schemas_properties(cls, token):
    assert _declared(getattr(resources, cls)) == schema.package()["resources"][token]["properties"].keys()


def test_every_property_says_what_it_is():
    for resource in schema.package()["resources"].values():
        for name, prop in (resource["inputProperties"] | resource["properties"]).items():
            assert prop["description"], name


def test_the_schema_marks_the_private_key_secret():
    assert schema.package()["resources"][tokens.SSH_KEY]["properties"]["privateKey"]["secret"]
