"""Handles every kind of stack `base`: the engine's calls, put to the kind's keeper.

What a thing is and what it should be are values of one type, and both are inputs: so a refresh writes what it finds
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
from mgpu.iac.handler import Call, Checked, Difference, Found, Properties, changed
from mgpu.iac.wire import UNKNOWN
from mgpu.providers.aws.base import thing
from mgpu.providers.aws.base.thing import Keeper, Site, Thing
from mgpu.providers.aws.options import Options
from mgpu.providers.aws.session import Account

_OPTIONS = {"account": "account", "profile": "profile", "endpointUrl": "endpoint_url"}


class BaseHandler:
    """Handles the kind that `keeper` keeps. The id is AWS's own; `limit_s`: seconds for something to be gone."""

    secret: frozenset[str] = frozenset()
    refresh_before_update = True

    def __init__(self, keeper: type[Keeper[Any]], limit_s: float) -> None:
        self._make_keeper, self._thing, self._limit_s = keeper, keeper.thing, limit_s

    def check(self, call: Call, old: Properties, new: Properties) -> Checked:
        """Fills in defaults, and all that follows from what was given."""
        names = settable(self._thing)
        given = {names[key]: value for key, value in new.items() if key in names and value is not None}
        wrong = {key: f"a {self._thing.__name__} takes no such property" for key in new if key not in names}
        wrong |= {key: f"the provider needs `{key}`" for key in ("account", "region") if key not in call.settings.aws}
        if wrong or _has_unknown(given):  # in a preview: the update checks again
            return Checked(new, wrong)
        try:
            wanted = self._thing.model_validate(given)
        except ValidationError as error:
            return Checked(new, {to_camel(str(each["loc"][0])): each["msg"] for each in error.errors()})
        return Checked(_wire(self._keeper(call).complete(wanted)))

    def diff(self, old_inputs: Properties, old: Properties, new: Properties) -> Difference:
        """Another name or network is another thing; all else is changed in place."""
        identity = tuple(to_camel(name) for name in self._thing.identity)
        others = tuple(to_camel(name) for name in self._thing.model_fields if to_camel(name) not in identity)
        return Difference(changed(others, old_inputs, new), changed(identity, old_inputs, new))

    def create(self, call: Call, inputs: Properties) -> tuple[str, Properties]:
        """Makes it, or takes what is there and ours; a preview looks already, and refuses what cannot be used."""
        if _has_unknown(inputs):
            return "", {**inputs, **dict.fromkeys(self._thing.facts, UNKNOWN)}
        keeper, wanted = self._keeper(call), self._value(inputs)
        if not call.preview:
            made = thing.ensure(keeper, wanted)
            return made.id, {**inputs, **made.facts}
        found = thing.examined(keeper, wanted)
        if found is not None and wanted.existing is None:
            call.emit(Note(f"{keeper.kind} {found.id} is there already: it is taken, and brought in line"))
        facts = found.facts if found else keeper.expected(wanted)
        return "", {**inputs, **dict.fromkeys(self._thing.facts, UNKNOWN), **facts}

    def read(self, call: Call, resource_id: str, old: Properties, inputs: Properties) -> Found | None:
        """As it is now. A thing that AWS says is gone is gone; there is no import, because create takes what is there.

        Raises:
            InputError: an import was asked for.
        """
        if not inputs:
            why = "`mgpu bootstrap aws` takes what is there and tagged as ours, by its name."
            raise InputError(f"{self._thing.__name__} cannot be imported", why, "Give it as `existing`, or run that.")
        found = thing.look(self._keeper(call), self._value(inputs))
        if found is None:
            return None
        state = _wire(found.state)
        return Found(found.id, state, {**old, **state, **found.facts})

    def update(self, call: Call, resource_id: str, old: Properties, new: Properties) -> Properties:
        """Brings it in line, in place."""
        facts = {key: old.get(key) for key in self._thing.facts}
        if not call.preview:
            facts |= thing.ensure(self._keeper(call), self._value(new)).facts
        return {**facts, **new}

    def delete(self, call: Call, resource_id: str, old: Properties) -> None:
        """Ends it, and says so only when AWS does; absent is success."""
        keeper, wanted = self._keeper(call), self._value(old)
        thing.remove(keeper, wanted)
        if wanted.stays:
            call.emit(Note(f"{keeper.kind} {resource_id} is left as it is"))

    def _keeper(self, call: Call) -> Keeper[Any]:
        def sleep(seconds: float) -> None:
            if call.cancelled.wait(seconds):
                raise Interrupted(f"waiting for the {self._make_keeper.kind} of base was cancelled")

        aws = call.settings.aws
        account = _account(*(aws.get(wire, "") for wire in _OPTIONS))
        return self._make_keeper(Site(account, aws["region"], self._limit_s, sleep=sleep))

    def _value(self, properties: Properties) -> Thing:
        """The thing that these inputs, or outputs, say."""
        names = {to_camel(name) for name in self._thing.model_fields}
        return self._thing.model_validate({key: value for key, value in properties.items() if key in names})


@functools.lru_cache(maxsize=8)
def _account(*given: str) -> Account:
    """One for all calls: a client costs a tenth of a second."""
    return Account(Options.of(dict(zip(_OPTIONS.values(), given, strict=True))))


def _wire(value: Thing) -> Properties:
    """As plain data with the wire's names."""
    return value.model_dump(mode="json", by_alias=True, exclude_none=True)


def _has_unknown(value: Any) -> bool:
    """Whether something in it is known only once another resource is there."""
    if isinstance(value, (dict, list)):
        return any(_has_unknown(item) for item in (value.values() if isinstance(value, dict) else value))
    return value == UNKNOWN
