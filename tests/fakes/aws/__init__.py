"""A fake AWS: moto in a process of its own, with what moto lacks, and Linux machines behind its instances.

    with FakeAws.start(folder) as aws:              # machines=True: real ones, in a network of their own
                                                    # engines=True: with Docker, and ECR has a registry
        PATH = f"{PROGRAMS}:{PATH}"                 # AWS's session-manager-plugin, or what stands in for it
        os.environ.update(aws.env)                  # less FOREIGN
        aws.capacity(0, zone="us-east-1a")          # nothing left there
        aws.lose_answers("CreateFleet")             # it runs, and the connection closes
        ...
        assert aws.alive() == []                    # what AWS would bill now

Requests (`fault`'s words; actions as boto3 operations, `*` as in file names):
    errors(action, code, n, after=, share=, skip=, region=, status=)   any code; with `after` it ran all the same
    throttle, unavailable, deny, expire                               as each service spells them: for EC2
                                      RequestLimitExceeded, Unavailable, UnauthorizedOperation, RequestExpired
    lose_answers, hang, calm          calls() lists what came, for counting retries
What EC2 has:
    capacity, price, quota            by type, zone (name or id) and market; the newest word about a pool holds
    reserve, sell                     capacity reservations; Capacity Blocks, and what is on sale of them
    fewer                             a fleet comes with less than MinTargetCapacity
    image(region), base(region)       what machines are made of and stand on; unknown images are refused
How fast it is: as slow as EC2 (see pace.py), on a clock that runs faster than the wall's
    quick(), pace(pending_s=, ending_s=, forget_s=, ...), lag, pages, stubborn
    age(seconds)                      all that exists is that much older: what is due happens, also schedules
What happens to machines:
    kill, interrupt, rebalance, stop  spot market and power-off
    endpoints, sessions, server       Session Manager: a way out for agents, who was there, an SSH server behind it

True here and not in stock moto: client tokens, all of a launch template, all or nothing, single type and zone, the
states between, terminated machines forgotten, placement groups, scores, spot history, Pricing, Service Quotas, deep-
learning images, schedules carried out by their role's permissions, addresses that cannot be released in use, sessions.
Not judged: IAM conditions (but the reaper's), security groups, fleets that are not instant.

It ends with the process that started it. Requests are answered one at a time; its own waiting (hang) is not.
"""

from __future__ import annotations

from fakes.aws.fake import FOREIGN, PROGRAMS, Called, FakeAws, Row

__all__ = ["FOREIGN", "PROGRAMS", "Called", "FakeAws", "Row"]
