"""The machines of one stack: a key that logs in, an image, a fleet. Yours to change: runs need only the output `mgpu`.

`. .mgpu/env && pulumi up` makes the fleet that `mgpu.yaml` asks for; another run file for the selected stack:
`pulumi config set mgpu:runFile other.yaml`.
"""

from __future__ import annotations

import pulumi

from mgpu.iac import resources as mgpu

spec = mgpu.run_spec()
# The configuration of the plugin is in state from the first `up` on: nothing is taken from the surroundings later.
opts = pulumi.ResourceOptions(provider=mgpu.Provider("mgpu"))

key = mgpu.SshKey("key", opts=opts)
image = mgpu.Image("image", mgpu.image_args(spec), opts=opts) if spec.image else None
fleet = mgpu.Fleet(
    "fleet",
    mgpu.fleet_args(spec),
    key=key,
    store=None if spec.checkpoint == "none" else spec.checkpoint.to,
    image=image,
    opts=opts,
)

# What `mgpu run` reads, and its JSON schema: docs/formats.md
pulumi.export("mgpu", fleet.output)
