"""The image of a run: settled before anything is rented, recorded by its digest, the same for whoever goes on."""

from __future__ import annotations

import hashlib
import json
from contextlib import contextmanager

import pytest
from fakes.registries import Said, scripted
from mgpu_train.agent.host.layout import RunLayout
from mgpu_train.agent.host.python_env import PROBLEM
from mgpu_train.agent.status.status import Fault, Phase

from mgpu.acquire import fit
from mgpu.acquire.fit import Machines
from mgpu.context import Context
from mgpu.errors import AuthError, ImageError, InputError, PermissionDenied, SpecError
from mgpu.events import Note, PhaseStarted, Warned
from mgpu.iac.outputs import StackOutput
from mgpu.image import compat, publish
from mgpu.image.registry.auth import Login
from mgpu.image.registry.reference import Reference
from mgpu.plan.model import Offer, Plan, Requirements
from mgpu.providers.base import MachineDriver, Offers
from mgpu.remote.targets import Result
from mgpu.run.job import images
from mgpu.run.job.images import Looked, Settled
from mgpu.run.lifecycle import attach
from mgpu.run.lifecycle import launch as runs
from mgpu.run.nodes import code_upload, node_check
from mgpu.run.record import record
from mgpu.run.record.folder import Folder
from mgpu.run.record.record import State
from mgpu.spec.load import load, loads
from mgpu.spec.model import Code

LABELS = {compat.TORCH: "2.7.1", compat.CUDA: "12.8", compat.PYTHON: "3.11"}
RUN_FILE = """
name: it
provider: local
max_hours: 1
max_price_usd_per_hour: 1
command: [train.py]
"""


def digest(body: bytes) -> str:
    return f"sha256:{hashlib.sha256(body).hexdigest()}"


class Kept:
    """A registry with one image, `it` by its `tags`; `gone`: it has none any more."""

    def __init__(self, labels=LABELS, workdir="/app"):
        self.gone, self.tags = False, ["1"]
        said = {"Labels": {**labels, "other": "x"}, "WorkingDir": workdir}
        self.config = json.dumps({"os": "linux", "architecture": "amd64", "config": said}).encode()
        layers = [{"digest": "sha256:" + "1" * 64, "size": 70}]
        body = {"layers": layers, "config": {"digest": digest(self.config), "size": len(self.config)}}
        self.manifest = json.dumps(body).encode()

    def __call__(self, asked):
        if "/blobs/" in asked.path:
            return Said(200, body=self.config)
        known = (*(f"/it/manifests/{tag}" for tag in self.tags), digest(self.manifest))
        if self.gone or not asked.path.endswith(known):
            return Said(404)
        return Said(200, {"Docker-Content-Digest": digest(self.manifest)}, self.manifest)


class Place:
    """The world, and a run file whose image is in a registry of this test."""

    def __init__(self, world, server):
        self.world, self.server, self.kept = world, server, server.script
        (world.folder / "train.py").write_text("pass\n")

    @property
    def reference(self):
        return f"{self.server.address}/it@{digest(self.kept.manifest)}"

    @property
    def context(self):
        return Context(self.world.events.append, self.world.timeouts)

    def spec(self, more="", image=None):
        image = image or f"{{reference: '{self.server.address}/it:1'}}"
        self.world.run_file.write_text(RUN_FILE + f"nodes: {len(self.world.nodes)}\nimage: {image}\n" + more)
        return load(self.world.run_file)

    def plain(self):
        """The run file without an image."""
        self.world.run_file.write_text(RUN_FILE + f"nodes: {len(self.world.nodes)}\n")
        return load(self.world.run_file)

    def launch(self, more="", **kwargs):
        return runs.launch(self.world.run_file, self.spec(more), self.context, **kwargs)

    def on_offer(self, *offers):
        """Machines of a plan with these offers, each a GPU and a region."""
        sold = {"provider": "local", "instance_type": "m", "market": "spot", "price_usd_per_hour": 1, "fetched_at": 0}
        wanted = Requirements(provider="local", nodes=1, gpu=("any",), max_price_usd_per_hour=1, max_hours=1)
        offered = tuple(Offer(gpu=gpu, region=region, **sold) for gpu, region in offers)
        return Machines.on_offer(self.world.cloud, Plan(requirements=wanted, offers=offered))

    def stands(self, **more):
        handle = self.world.cloud.rent("mine-dev", len(self.world.nodes))
        self.world.stacks["dev"] = self.world.output(handle).model_copy(update=more)
        return self.world.stacks["dev"]

    def run(self, more="", image=None):
        return runs.run(self.world.run_file, self.spec(more, image), "dev", self.context)

    def asked(self, rank=0):
        return self.world.nodes[rank].containers


@contextmanager
def at(world, **kept):
    with scripted(Kept(**kept)) as server:
        yield Place(world, server)


@pytest.fixture
def place(world):
    with at(world) as made:
        yield made


# --- one digest -----------------------------------------------------------------------------------------------------


def test_a_run_is_recorded_by_its_digest_and_every_node_runs_that(place):
    place.world.has_nodes(2)
    assert place.launch().exit_code == 0
    done = record.load("last")
    assert (done.image, done.image_bytes) == (place.reference, 70 + len(place.kept.config))
    assert done.image_labels == LABELS, "those of others say nothing to a run"
    for rank in (0, 1):
        ((verb, wanted),) = place.asked(rank)
        assert (verb, wanted["reference"], wanted["bytes"]) == ("up", place.reference, done.image_bytes)
    assert "image" in done.phase_seconds
    said = [event.detail for event in place.world.of(PhaseStarted)] + [note.text for note in place.world.of(Note)]
    assert any(line.endswith(" B: nothing was built or pushed") for line in said)
    assert [line for line in said if "sha256" in line] == [place.reference], "of a digest one line is enough"


def test_an_image_that_is_named_by_its_digest_is_told_by_its_repository(place):
    spec = place.spec(image=f"{{reference: '{place.reference}'}}")
    runs.launch(place.world.run_file, spec, place.context)
    repository = place.reference.partition("@")[0]
    assert [each.detail for each in place.world.of(PhaseStarted) if each.phase == "image"] == [repository]


def test_without_an_image_no_container_is_asked_for(place):
    place.world.run_file.write_text(RUN_FILE + "nodes: 1\n")
    place.world.nodes[0].faults["container"] = [AssertionError("nobody asked for one")]
    assert runs.launch(place.world.run_file, load(place.world.run_file), place.context).exit_code == 0
    assert record.load("last").image is None
    assert not {"image", "pulling"} & set(record.load("last").phase_seconds)
    assert place.asked() == []
    assert place.server.asked == []


def test_with_an_image_the_machines_own_interpreter_is_not_made_ready(place):
    place.world.nodes[0].faults["equip"] = [AssertionError("nobody asked for it")]
    assert place.launch().exit_code == 0


def moves(place):
    """The tag means another image from now on."""
    place.server.script = Kept({**LABELS, compat.TORCH: "2.8.0"})


def test_the_next_attempt_runs_the_same_digest_though_the_tag_has_moved(place):
    before = place.reference

    def program(node, job):
        if job.attempt > 1:
            return place.world.succeed(node, job)
        moves(place)
        return node.says(Phase.FAILED, attempt=1, fault=Fault.INFRASTRUCTURE, reason="a disk went")

    place.world.program = program
    assert place.launch("recovery: {attempts: 2}\n").exit_code == 0
    assert [wanted["reference"] for verb, wanted in place.asked() if verb == "up"] == [before, before]
    assert record.load("last").image == before


def test_who_takes_over_runs_the_digest_of_the_record(place):
    place.spec()
    settled = Settled(place.reference, 70, "/app", LABELS)
    dead = place.world.record("run-1", state=State.PROVISIONING)
    images.remember(dead, settled)
    record.save(dead)
    Folder("run-1").run_file.write_text(place.world.run_file.read_text())
    moves(place)
    outcome = attach.attach(dead, place.context)
    assert outcome.exit_code == 0
    assert [wanted["reference"] for _, wanted in place.asked()] == [settled.reference]
    assert place.server.asked == [], "what is settled is not asked for again"


def test_a_login_is_asked_for_at_every_pull(place, monkeypatch):
    passwords = iter(["canary-1", "canary-2"])
    monkeypatch.setattr("mgpu.image.registry.auth.from_docker", lambda _registry: Login("me", next(passwords)))

    def program(node, job):
        if job.attempt > 1:
            return place.world.succeed(node, job)
        return node.says(Phase.FAILED, attempt=1, fault=Fault.INFRASTRUCTURE, reason="a disk went")

    place.world.program = program
    place.launch("recovery: {attempts: 2}\n")
    assert [wanted["login"]["password"] for verb, wanted in place.asked() if verb == "up"] == ["canary-1", "canary-2"]
    text = Folder(record.load("last").run_id).record.read_text()
    assert "canary" not in text


# --- before anything is rented --------------------------------------------------------------------------------------


def nothing_is_rented(place):
    assert place.world.calls == []
    assert place.world.cloud.billed == set()
    assert record.every() == []


def test_an_image_that_is_not_there_rents_nothing(place):
    place.kept.gone = True
    with pytest.raises(ImageError, match="no image"):
        place.launch()
    nothing_is_rented(place)


@pytest.mark.parametrize("gpus", [["T4", "H100-80GB"], ["V100-16GB"]])
def test_an_image_for_other_gpus_rents_nothing(world, gpus):
    with at(world, labels={**LABELS, compat.CUDA: "13.0", compat.TORCH: "2.9.0"}) as place:
        place.launch(machines=Machines(("H100-80GB",)))
        world.calls.clear()
        Folder(record.load("last").run_id).record.unlink()
        with pytest.raises(InputError, match="has no code for the V100") as caught:
            place.launch(machines=Machines((*gpus, "V100-16GB")))
        assert caught.value.next_step
        nothing_is_rented(place)


# --- the driver of the machine image ----------------------------------------------------------------------------------

OLD = MachineDriver(version="570.172.08", why='Image m-1 "theirs" brings 570.172.08.', cure="`machine: m-2` is newer.")
NEW = OLD.model_copy(update={"version": "580.105.08"})
CUDA_13 = {**LABELS, compat.CUDA: "13.0", compat.TORCH: "2.9.0"}


def test_a_machine_image_with_an_old_driver_rents_nothing(world):
    world.cloud.driver = OLD
    with at(world, labels=CUDA_13) as place:
        with pytest.raises(InputError, match=r"CUDA 13\.0 needs a newer NVIDIA driver than 570\.172\.08") as caught:
            place.launch(machines=place.on_offer(("A100-80GB", "r-1"), ("H100-80GB", "r-2")))
        assert caught.value.exit_code == 2
        assert caught.value.why.startswith(f"{OLD.why}\n")
        assert OLD.cure in caught.value.next_step
        assert world.cloud.asked_for_driver == [("r-1", "r-2")]
        nothing_is_rented(place)


def test_a_machine_image_with_a_driver_that_does_is_rented(world):
    world.cloud.driver = NEW
    with at(world, labels=CUDA_13) as place:
        assert place.launch(machines=place.on_offer(("A100-80GB", "r-1"))).exit_code == 0


@pytest.mark.parametrize("cuda", [{compat.CUDA: "cpu"}, {}], ids=["without", "unsaid"])
def test_for_an_image_that_has_no_cuda_nobody_is_asked_for_a_driver(world, cuda):
    world.cloud.driver = OLD
    with at(world, labels={compat.TORCH: "2.9.0", **cuda}) as place:
        assert place.launch(machines=place.on_offer((None, "r-1"))).exit_code == 0
    assert world.cloud.asked_for_driver == []


def test_without_credentials_the_driver_is_not_known(place):
    place.world.cloud.refuses["driver"] = [AuthError("there are no credentials")]
    fit.require(CUDA_13, place.on_offer((None, "r-1")))
    assert place.world.cloud.asked_for_driver == [("r-1",)]


def test_machines_that_stand_are_asked_for_the_driver_that_they_have(world):
    world.cloud.driver = OLD
    with at(world, labels=CUDA_13) as place:
        fleet = place.stands()
        with pytest.raises(InputError, match="needs a newer NVIDIA driver"):
            place.run()
        (asked,) = world.cloud.asked_for_driver
        assert (asked.fleet, asked.ids) == (fleet.fleet, tuple(node.id for node in fleet.nodes))
        assert record.every() == []
        place.stands(image=place.reference)
        with pytest.raises(InputError, match="needs a newer NVIDIA driver"):
            place.run()
        assert record.every() == []


def test_of_another_programs_machines_nobody_is_asked(world):
    world.ours, world.cloud.driver = False, OLD
    with at(world, labels=CUDA_13) as place:
        place.stands()
        assert place.run().exit_code == 0
    assert world.cloud.asked_for_driver == []


def test_code_in_an_image_without_a_folder_for_it_rents_nothing(world):
    with at(world, workdir="/") as place:
        spec = place.spec().model_copy(update={"code": None})
        spec = spec.model_copy(update={"code": Code(mode="image")})
        with pytest.raises(InputError, match="does not say where the code is") as caught:
            runs.launch(world.run_file, spec, place.context)
        assert "WORKDIR" in caught.value.next_step
        nothing_is_rented(place)


def test_code_in_the_image_is_run_there_and_not_sent(world, monkeypatch):
    for module in (images, code_upload):  # an image that is built has it; the one of this test is there already
        monkeypatch.setattr(module, "in_image", lambda _spec: True)
    with at(world, workdir="/app") as place:
        jobs = []
        world.program = lambda node, job: (jobs.append(job), world.succeed(node, job))
        assert place.launch().exit_code == 0
        assert jobs[0].workdir == "/app"
        assert "sync runs" not in world.calls
        assert not Folder(record.load("last").run_id).work.exists()


def test_code_that_is_sent_is_run_where_it_was_sent_to(place):
    jobs = []
    place.world.program = lambda node, job: (jobs.append(job), place.world.succeed(node, job))
    place.launch()
    assert jobs[0].workdir == str(RunLayout(jobs[0].run_id).work)
    assert "sync runs" in place.world.calls


def test_code_in_the_image_needs_a_context_and_data_a_place_of_its_own():
    text = RUN_FILE.replace("provider: local", "provider: aws") + "checkpoint: none\n"
    text += "data: [{from: 's3://bucket/a', to: tokens}]\ncode: {mode: image}\nimage: {}\n"
    with pytest.raises(SpecError) as caught:
        loads(text, "f.yaml")
    assert [each.field for each in caught.value.problems] == ["data[0].to", "code.mode"]
    fine = text.replace("image: {}", "image: {context: mine}").replace("tokens", "/data/tokens")
    assert loads(fine, "f.yaml").code.mode == "image"


# --- machines that stand --------------------------------------------------------------------------------------------


def test_the_stacks_image_is_run_before_the_run_files(place):
    place.stands(image=place.reference)
    assert place.run(image="{reference: 'registry.invalid/other:1'}").exit_code == 0
    assert record.load("last").image == place.reference
    assert place.asked()[0][1]["reference"] == place.reference


def own(place, recipe="FROM scratch\nCOPY train.py /app/\n"):
    """A run file's own context, and its `image:`."""
    context = place.world.folder / "docker"
    context.mkdir()
    (context / "Dockerfile").write_text(recipe)
    (context / "train.py").write_text("pass\n")
    return f"{{context: docker, repository: '{place.server.address}/it'}}"


def warned(place):
    return [event.text for event in place.world.events if isinstance(event, Warned)]


def test_a_stacks_image_that_is_what_the_folder_makes_runs(place):
    place.stands(image=place.reference)
    image = own(place)
    spec = place.spec("code: {mode: image}\n", image)
    place.kept.tags.append(images.look(spec, place.world.folder).name.rpartition(":")[2])
    assert place.run("code: {mode: image}\n", image).exit_code == 0
    assert warned(place) == []


def test_a_stacks_image_with_other_code_than_the_folders_does_not_run(place):
    place.stands(image=place.reference)
    image = own(place)
    with pytest.raises(InputError, match="the stack's image is not docker as it is now") as caught:
        place.run("code: {mode: image}\n", image)
    assert f"{place.server.address}/it:mgpu-" in caught.value.why
    assert "pulumi up" in caught.value.next_step
    assert record.every() == []


def test_a_stacks_older_image_is_told_where_the_code_is_sent(place):
    place.stands(image=place.reference)
    assert place.run(image=own(place)).exit_code == 0
    (text,) = warned(place)
    assert "the stack's image is not docker as it is now" in text
    assert "pulumi up" in text


def test_a_stacks_image_that_cannot_be_compared_runs_and_that_is_told(place, monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", f"unix://{place.world.folder}/none")
    place.stands(image=place.reference)
    image = own(place, f"FROM {place.server.address}/nobody:1\n")
    assert place.run("code: {mode: image}\n", image).exit_code == 0
    (text,) = warned(place)
    assert "is not known: no base image" in text


def test_what_a_stacks_image_lacks_is_missed_where_it_is_the_one_that_the_run_file_builds(place, monkeypatch):
    fleet = place.stands(image=place.reference)
    name = Reference.parse(f"{place.server.address}/it:1")
    monkeypatch.setattr(images.publish, "wanted", lambda *_: publish.Wanted(name))
    text = RUN_FILE.replace("command: [train.py]", "train: {optimizer: adamw8bit}")
    spec = loads(f"{text}image: {{repository: '{place.server.address}/it'}}\n", "mgpu.yaml")
    with pytest.raises(InputError, match="the trainer's image lacks torchao"):
        images.for_stack(spec, place.world.folder, fleet)
    place.kept.tags = ["2"]  # another one: whoever has built it knows what is in it
    assert images.for_stack(spec, place.world.folder, fleet).reference == place.reference


def test_a_stack_without_one_runs_the_run_files(place):
    place.stands()
    assert place.run().exit_code == 0
    assert record.load("last").image == place.reference


def test_a_stacks_image_without_a_digest_is_refused(place):
    place.stands(image=f"{place.server.address}/it:1")
    with pytest.raises(InputError, match="not named by its digest"):
        place.run()
    assert place.asked() == []


def test_a_stacks_image_that_is_gone_from_its_registry_is_said_before_the_run_begins(place):
    place.stands(image=place.reference)
    place.kept.gone = True
    with pytest.raises(ImageError):
        place.run()
    assert record.every() == []


def test_an_image_that_does_not_fit_the_machines_that_stand_is_refused(world):
    with at(world, labels={**LABELS, compat.CUDA: "13.0", compat.TORCH: "2.9.0"}) as place:
        place.stands(gpu="V100-16GB")
        with pytest.raises(InputError, match="has no code for the V100"):
            place.run()


def test_an_image_that_the_stack_made_for_it_brings_is_run_and_recorded(place):
    """A program of the user's makes one that the run file does not know."""
    whole = place.world.output
    place.world.output = lambda *of: whole(*of).model_copy(update={"image": place.reference})
    place.world.run_file.write_text(RUN_FILE + "nodes: 1\n")
    assert runs.launch(place.world.run_file, load(place.world.run_file), place.context).exit_code == 0
    assert record.load("last").image == place.reference
    assert place.asked()[0][1]["reference"] == place.reference


def test_the_digest_of_the_record_is_run_whatever_the_stack_says_later(place):
    whole = place.world.output
    other = f"{place.server.address}/it@sha256:{'0' * 64}"
    place.world.output = lambda *of: whole(*of).model_copy(update={"image": other})
    assert place.launch().exit_code == 0
    assert record.load("last").image == place.reference
    assert place.asked()[0][1]["reference"] == place.reference


def test_machines_that_stay_and_ran_no_image_are_not_asked_for_containers(place):
    place.world.run_file.write_text(RUN_FILE + "nodes: 1\nteardown: keep\n")
    assert runs.launch(place.world.run_file, load(place.world.run_file), place.context).exit_code == 0
    assert place.asked() == []


@pytest.mark.parametrize(("teardown", "verbs"), [("keep", ["up", "down"]), ("always", ["up"])])
def test_machines_that_stay_are_left_without_a_container(place, teardown, verbs):
    assert place.launch(f"teardown: {teardown}\n").exit_code == 0
    assert [verb for verb, _ in place.asked()] == verbs


def test_another_programs_machines_are_left_without_one_too(place):
    place.world.ours = False
    place.stands(image=place.reference)
    assert place.run().exit_code == 0
    assert [verb for verb, _ in place.asked()] == ["up", "down"]


def test_a_container_that_cannot_be_ended_is_told_and_the_run_has_succeeded(place):
    answer = json.dumps({"problem": "docker", "why": "it hangs"}).encode()
    place.world.nodes[0].contained["down"] = Result(PROBLEM, answer, b"")
    assert place.launch("teardown: keep\n").exit_code == 0
    assert any("may be left" in getattr(event, "text", "") for event in place.world.events)


def test_a_pull_that_fails_on_one_node_gives_the_fleet_back_and_names_it(place):
    place.world.has_nodes(2)
    answer = json.dumps({"problem": "absent", "why": "manifest unknown"}).encode()
    place.world.nodes[1].contained["up"] = Result(PROBLEM, answer, b"")
    outcome = place.launch()
    assert outcome.exit_code == 5
    assert "node 1" in outcome.error.what
    assert "not in its registry" in outcome.error.what
    assert outcome.error.next_step
    assert place.world.cloud.billed == set()
    assert record.load("last").teardown == "confirmed"


def test_stores_that_are_folders_of_the_node_are_seen_in_the_container(place, tmp_path):
    place.launch(f"checkpoint: {{to: 'file://{tmp_path}/store'}}\n")
    assert place.asked()[0][1]["writable"] == [f"{tmp_path}/store"]


# --- what is shown --------------------------------------------------------------------------------------------------


@pytest.fixture
def priced(place, monkeypatch):
    def offers(_requirements):
        one = Offer(
            provider="local", instance_type="m", region="here", market="on-demand", price_usd_per_hour=0.5, fetched_at=1
        )
        return Offers(offers=(one,), source="live")

    monkeypatch.setattr(place.world.cloud, "offers", offers, raising=False)
    place.spec()
    return place


def test_the_plan_says_that_the_image_is_there(priced, mgpu):
    done = mgpu("plan", "--json")
    assert done.code == 0
    name = f"{priced.server.address}/it:1"
    assert done.json["image"] == {"name": name, "in_registry": True, "reference": priced.reference}
    assert f"image {priced.reference}: in its registry" in mgpu("plan").err


def test_the_plan_says_that_it_will_be_built(priced, mgpu):
    context = priced.world.folder / "image"
    context.mkdir()
    (context / "Dockerfile").write_text("FROM scratch\nCOPY Dockerfile /\n")
    priced.spec(image=f"{{context: image, repository: '{priced.server.address}/new'}}")
    done = mgpu("plan", "--json")
    assert (done.json["image"]["in_registry"], done.json["image"]["reference"]) == (False, None)
    assert done.json["image"]["name"].startswith(f"{priced.server.address}/new:mgpu-")
    assert "it is built and pushed first" in mgpu("plan").err


def test_the_plan_tells_what_launch_would_refuse_or_leave_out(priced, mgpu, monkeypatch):
    monkeypatch.delenv("MGPUTEST_TOKEN", raising=False)
    image = own(priced, "FROM scratch\nARG WORD\nCOPY train.py /\n")
    priced.spec("secrets: [MGPUTEST_KEY]\n", image[:-1] + ", args: {WROD: x}, secrets: [MGPUTEST_TOKEN]}")
    done = mgpu("plan")
    assert done.code == 0
    assert "image.secrets: MGPUTEST_TOKEN not set in the environment" in done.err
    assert "warning: secrets: MGPUTEST_KEY not set in the environment" in done.err
    assert "no ARG WROD, the value is not used; did you mean `WORD`?" in done.err
    monkeypatch.setenv("MGPUTEST_TOKEN", "x")
    assert "MGPUTEST_TOKEN" not in mgpu("plan").err


def test_the_plan_refuses_a_target_that_is_no_stage(priced, mgpu):
    priced.spec(image=own(priced)[:-1] + ", target: none}")
    done = mgpu("plan")
    assert (done.code, "has no stage `none`" in done.err) == (2, True)


def test_the_plan_shows_the_price_though_the_image_is_not_there(priced, mgpu):
    priced.kept.gone = True
    done = mgpu("plan")
    assert (done.code, "$0.50" in done.out, "no image" in done.err) == (4, True, True)
    assert mgpu("plan", "--json").json["image"] is None


def test_a_plan_without_an_image_says_nothing_of_one(priced, mgpu):
    priced.world.run_file.write_text(RUN_FILE + "nodes: 1\n")
    assert mgpu("plan", "--json").json["image"] is None


@pytest.fixture
def too_new(priced):
    """An image whose CUDA the machines' driver does not run."""
    priced.kept = priced.server.script = Kept(CUDA_13)
    priced.world.cloud.driver = OLD
    return priced


def test_the_plan_says_that_the_driver_is_too_old(too_new, mgpu):
    done = mgpu("plan")
    assert (done.code, "$0.50" in done.out) == (2, True)
    for words in ("CUDA 13.0 needs a newer NVIDIA driver than 570.172.08", OLD.why, OLD.cure):
        assert words in done.err
    assert too_new.world.cloud.asked_for_driver == [("here",)]


def test_launch_ends_before_it_asks_for_the_money(too_new, mgpu):
    done = mgpu("launch")
    assert (done.code, "nobody can be asked" in done.err) == (2, False)
    assert OLD.why in done.err
    nothing_is_rented(too_new)


def test_an_image_that_launch_builds_is_compared_when_it_is_there(too_new, mgpu, monkeypatch):
    monkeypatch.setattr(images, "look", lambda *_: Looked("it:1", None))
    done = mgpu("launch", "--yes")
    assert (done.code, OLD.why in done.err) == (2, True)
    nothing_is_rented(too_new)


def test_launch_asks_once_for_the_driver(too_new, mgpu):
    too_new.world.cloud.driver = NEW
    assert mgpu("launch", "--yes").code == 0
    assert too_new.world.cloud.asked_for_driver == [("here",)]


def test_a_provider_that_does_not_answer_ends_the_launch_and_the_plan_has_its_price(too_new, mgpu):
    too_new.world.cloud.refuses["driver"] = [PermissionDenied("you may not look at images")]
    done = mgpu("plan")
    assert (done.code, "$0.50" in done.out, "may not look" in done.err) == (3, True, True)
    assert mgpu("launch", "--yes").code == 3
    nothing_is_rented(too_new)


def test_without_an_image_nobody_is_asked_for_a_driver(too_new, mgpu):
    too_new.plain()
    assert mgpu("plan").code == 0
    assert mgpu("launch", "--yes").code == 0
    assert too_new.world.cloud.asked_for_driver == []


def test_status_shows_it(place, mgpu):
    place.launch()
    assert mgpu("status", "--json").json["image"] == place.reference
    assert place.reference in mgpu("status").out


def test_launch_shows_it_before_it_asks(priced, mgpu):
    done = mgpu("launch")
    assert done.code == 2, "nobody can be asked"
    assert done.err.index(priced.reference) < done.err.index("nobody can be asked")
    nothing_is_rented(priced)


# --- whose registry -------------------------------------------------------------------------------------------------


def test_credentials_that_are_not_there_end_it_before_anything(place):
    def refuse(_regions):
        raise AuthError("the key has expired")

    place.world.cloud.image_repository = refuse
    context = place.world.folder / "image"
    context.mkdir()
    (context / "Dockerfile").write_text("FROM scratch\n")
    spec = place.spec()
    spec = spec.model_copy(update={"image": type(spec.image)(context="image")})
    with pytest.raises(AuthError):
        runs.launch(place.world.run_file, spec, place.context)
    nothing_is_rented(place)


# --- what the machines say ------------------------------------------------------------------------------------------

GPU = {"name": "NVIDIA A100-SXM4-40GB", "memory_mib": 40960, "compute_capability": "8.0"}
FACTS = {
    "python": "3.11.2", "machine": "x86_64", "driver": "570.86.15", "gpus": [GPU], "gpu_problem": None,
    "torch": None, "cuda": None, "docker": "27.1", "docker_root": "/var/lib/docker", "docker_free_bytes": 50 << 30,
    "docker_problem": None,
}  # fmt: skip


def lines(place, facts, gpus_per_node=1, labels=LABELS):
    fleet = StackOutput.model_validate(place.stands()).model_copy(update={"gpus_per_node": gpus_per_node})
    run = place.world.record("run-1", fleet=fleet.model_dump(mode="json"), image=place.reference)
    run.image_labels = dict(labels)
    return {line.subject.partition(": ")[2]: line for line in node_check.of_node(0, {**FACTS, **facts}, run)}


def test_a_machine_that_fits_is_all_green(place):
    found = lines(place, {})
    assert {line.status for line in found.values()} == {"ok"}
    assert "1 x NVIDIA A100-SXM4-40GB (8.0), driver 570.86.15" in found["GPUs"].detail
    assert "50 GiB free" in found["Docker"].detail
    assert "PyTorch 2.7.1, CUDA 12.8" in found["image"].detail


@pytest.mark.parametrize(
    ("facts", "subject", "words"),
    [
        ({"gpus": [], "driver": None, "gpu_problem": "no nvidia-smi"}, "GPUs", "0 of 1, no driver: no nvidia-smi"),
        (
            {"gpus": [GPU, {**GPU, "mig": True}]},
            "GPUs",
            "2, driver 570.86.15; in MIG mode, where a program sees one part",
        ),
        ({"docker": None, "docker_problem": "there is no program docker"}, "Docker", "no program docker"),
        ({"driver": "470.82.01"}, "image", "newer NVIDIA driver than 470"),
        ({"gpus": [{**GPU, "compute_capability": "3.7"}]}, "image", "no code for the 3.7"),
    ],
)
def test_what_keeps_the_image_from_running_has_its_cure(place, facts, subject, words):
    line = lines(place, facts)[subject]
    assert line.status == "failed"
    assert words in line.detail
    assert line.cure


def test_without_gpus_the_driver_is_told_all_the_same(place):
    facts = {"gpus": [], "driver": None}
    assert lines(place, facts, gpus_per_node=0)["GPUs"].detail == "none, and none are asked for; no driver"
    found = lines(place, facts, gpus_per_node=0, labels={})["image"]
    assert (found.status, found.detail) == ("ok", "there are no GPUs that it would have to fit")


def test_an_image_that_was_not_compared_is_not_called_fitting(place):
    found = lines(place, {}, labels={})["image"]
    assert (found.status, bool(found.cure)) == ("warning", True)
    assert "no label dev.mgpu.torch" in found.detail


def test_who_has_no_docker_on_this_machine_is_not_told_to_rent_another_one(place):
    run = place.world.record("run-1", fleet=place.stands().model_dump(mode="json"), image=place.reference)
    facts = {**FACTS, "docker": None}
    cures = []
    for run.provider in ("local", "aws"):
        cures += [line.cure for line in node_check.of_node(0, facts, run) if line.subject.endswith("Docker")]
    assert ["Start Docker here" in cure for cure in cures] == [True, False]


def test_without_an_image_the_machines_own_pytorch_is_looked_at(place):
    run = place.world.record("run-1", fleet=place.stands().model_dump(mode="json"))
    facts = {**FACTS, "torch": "2.8.0+cu128", "cuda": "12.8", "driver": "470.82.01", "docker": None}
    found = {line.subject: line for line in node_check.of_node(0, facts, run)}
    assert found["node 0: Docker"].status == "ok", "nobody needs it"
    assert found["node 0: PyTorch"].status == "failed"
    facts["torch"] = None
    assert "none on this machine" in node_check.of_node(0, facts, run)[-1].detail


def test_the_nodes_are_asked_by_an_interpreter_of_their_own_and_a_silent_one_is_a_red_line(place, mgpu):
    place.world.has_nodes(3)
    for node in place.world.nodes:
        node.facts = FACTS
    place.world.nodes[1].reachable = False
    answer = json.dumps({"problem": "old", "why": "Python 3.8"}).encode()
    place.world.nodes[2].equipped = Result(PROBLEM, answer, b"")
    place.world.record("run-1", fleet=place.stands().model_dump(mode="json"))
    done = mgpu("check", "--on-node", "run-1", "--json")
    assert done.code == 3
    said = {line["subject"]: line for line in done.json["checks"]}
    assert said["node 0: GPUs"]["status"] == "ok"
    assert said["node 1"]["status"] == said["node 2"]["status"] == "failed"
    assert place.world.nodes[0].agent == [["facts"]], "what trains there is not touched"


def test_a_run_without_machines_cannot_be_asked(place, mgpu):
    place.launch()
    assert mgpu("check", "--on-node", "last").code == 2
    assert mgpu("check", "local", "--on-node", "last").code == 2
