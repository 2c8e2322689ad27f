"""Handles every kind of resource at AWS: the engine's calls, put to the kind's manager.

What a resource is and what it should be are values of one type, and both are inputs: so a refresh writes what it finds
into the inputs, and every property that differs shows by its name, old and new. Each `up` refreshes first.
"""

from __future__ import annotations

import functools
from typing import Any

from pydantic import ValidationError
from pydantic.alias_generators import to_camel

from mgpu.errors import InputError, Interrupted
from mgpu.events import Note
from mgpu.iac.aws.schema import settable
from mgpu.iac.protocol.handler import Call, Checked, Difference, Properties, ReadResult, changed
from mgpu.iac.protocol.wire import UNKNOWN, has_unknown
from mgpu.providers.aws.bootstrap import resource
from mgpu.providers.aws.bootstrap.resource import Manager, Resource, Site
from mgpu.providers.aws.options import Options
from mgpu.providers.aws.session import Account

_OPTIONS = {"account": "account", "profile": "profile", "endpointUrl": "endpoint_url"}


class AwsHandler:
    """Handles the kind that `manager` keeps. The id is AWS's own; `limit_s`: seconds for something to be gone."""

    secret: frozenset[str] = frozenset()
    refresh_before_update = True

    def __init__(self, manager: type[Manager[Any]], limit_s: float) -> None:
        self._make_manager, self._resource, self._limit_s = manager, manager.resource, limit_s

    def check(self, call: Call, old: Properties, new: Properties) -> Checked:
        """Fills in defaults, and all that follows from what was given."""
        names = settable(self._resource)
        given = {names[key]: value for key, value in new.items() if key in names and value is not None}
        wrong = {key: f"a {self._resource.__name__} takes no such property" for key in new if key not in names}
        wrong |= {key: f"the provider needs `{key}`" for key in ("account", "region") if key not in call.settings.more}
        if wrong or has_unknown(given):  # in a preview: the update checks again
            return Checked(new, wrong)
        try:
            wanted = self._resource.model_validate(given)
        except ValidationError as error:
            return Checked(new, {to_camel(str(each["loc"][0])): each["msg"] for each in error.errors()})
        return Checked(_wire(self._manager(call).complete(wanted)))

    def diff(self, old_inputs: Properties, old: Properties, new: Properties) -> Difference:
        """Another name or network is another resource; all else is changed in place."""
        identity = tuple(to_camel(name) for name in self._resource.identity)
        others = tuple(to_camel(name) for name in self._resource.model_fields if to_camel(name) not in identity)
        return Difference(changed(others, old_inputs, new), changed(identity, old_inputs, new))

    def create(self, call: Call, inputs: Properties) -> tuple[str, Properties]:
        """Makes it, or takes what is there and ours; a preview looks already, and refuses what cannot be used."""
        if has_unknown(inputs):
            return "", {**inputs, **dict.fromkeys(self._resource.facts, UNKNOWN)}
        manager, wanted = self._manager(call), self._value(inputs)
        if not call.preview:
            made = resource.ensure(manager, wanted)
            return made.id, {**inputs, **made.facts}
        found = resource.examined(manager, wanted)
        if found is not None and wanted.existing is None:
            call.emit(Note(f"{manager.kind} {found.id} is there already: it is taken, and brought in line"))
        facts = found.facts if found else manager.expected(wanted)
        return "", {**inputs, **dict.fromkeys(self._resource.facts, UNKNOWN), **facts}

    def read(self, call: Call, resource_id: str, old: Properties, inputs: Properties) -> ReadResult | None:
        """As it is now. A resource that AWS says is gone is gone; there is no import, because create takes what is
        there.

        Raises:
            InputError: an import was asked for.
        """
        if not inputs:
            why = "`mgpu bootstrap aws`, or `mgpu schedule install --aws`, takes what is there and tagged as ours."
            raise InputError(
                f"{self._resource.__name__} cannot be imported", why, "Give it as `existing`, or run that."
            )
        found = resource.look(self._manager(call), self._value(inputs))
        if found is None:
            return None
        state = _wire(found.state)
        return ReadResult(found.id, state, {**old, **state, **found.facts})

    def update(self, call: Call, resource_id: str, old: Properties, new: Properties) -> Properties:
        """Brings it in line, in place."""
        facts = {key: old.get(key) for key in self._resource.facts}
        if not call.preview:
            facts |= resource.ensure(self._manager(call), self._value(new)).facts
        return {**facts, **new}

    def delete(self, call: Call, resource_id: str, old: Properties) -> None:
        """Ends it, and says so only when AWS does; absent is success."""
        manager, wanted = self._manager(call), self._value(old)
        resource.remove(manager, wanted)
        if wanted.stays:
            call.emit(Note(f"{manager.kind} {resource_id} is left as it is"))

    def _manager(self, call: Call) -> Manager[Any]:
        def sleep(seconds: float) -> None:
            if call.cancelled.wait(seconds):
                raise Interrupted(f"waiting for the {self._make_manager.kind} was cancelled")

        aws = call.settings.more
        account = _account(*(aws.get(wire, "") for wire in _OPTIONS))
        return self._make_manager(Site(account, aws["region"], self._limit_s, sleep=sleep))

    def _value(self, properties: Properties) -> Resource:
        """The resource that these inputs, or outputs, say."""
        names = {to_camel(name) for name in self._resource.model_fields}
        return self._resource.model_validate({key: value for key, value in properties.items() if key in names})


@functools.lru_cache(maxsize=8)
def _account(*given: str) -> Account:
    """One for all calls: a client costs a tenth of a second."""
    return Account(Options.of(dict(zip(_OPTIONS.values(), given, strict=True))))


def _wire(value: Resource) -> Properties:
    """As plain data with the wire's names."""
    return value.model_dump(mode="json", by_alias=True, exclude_none=True)
