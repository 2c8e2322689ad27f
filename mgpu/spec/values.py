"""What a value may be, in words: for a refusal by pydantic, the sentence that a user reads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, get_args

from mgpu_train.config import Brought, EnvName, MetricName, Text
from pydantic import StringConstraints

# what a pattern asks for; a refused value is not repeated, because it may be a secret in the wrong place
_FORMS = {
    get_args(MetricName)[1].pattern: "letters, digits, `.`, `_`, `-` and `/`, at most 128",
    get_args(Text)[1].pattern: "text without NUL",
    get_args(Brought)[1].pattern: "a name in lower case, or package.module:Class",
    get_args(EnvName)[1].pattern: "the name of an environment variable: letters, digits and `_`, no digit first",
}


def form(pattern: str, words: str, *, max_length: int | None = None) -> StringConstraints:
    """Text that matches a pattern; `words` say what the pattern asks for: "must be ..."."""
    _FORMS[pattern] = words
    return StringConstraints(pattern=pattern, max_length=max_length)


def no_name(text: str) -> str:
    """Why this cannot be the name of a file or folder; "" where it can."""
    if not text.strip() or text != text.strip() or "\n" in text:
        return "is one name, not empty and without spaces around it"
    return "begins with `-`: programs would read it as an option" if text.startswith("-") else ""


def refusal(error: Mapping[str, Any], given: str) -> str:
    """The message for a value, shown as `given`, that one of pydantic's errors refuses."""
    limits = error.get("ctx", {})
    match error["type"]:
        case "int_type" | "int_from_float" | "int_parsing":
            return f"a whole number is needed, not {given}"
        case "float_type" | "float_parsing":
            return f"a number is needed, not {given}"
        case "bool_type" | "bool_parsing":
            return f"yes or no is needed, not {given}"
        case "less_than":
            return f"must be less than {limits['lt']:g}, not {given}"
        case "greater_than":
            return f"must be more than {limits['gt']:g}, not {given}"
        case "greater_than_equal":
            return f"must be at least {limits['ge']:g}, not {given}"
        case "less_than_equal":
            return f"must be at most {limits['le']:g}, not {given}"
        case "too_short":
            return f"needs at least {limits['min_length']} item"
        case "too_long":
            return f"has {limits['actual_length']} items; {limits['max_length']} at most"
        case "string_too_long":
            return f"longer than {limits['max_length']} characters"
        case "string_pattern_mismatch":
            return f"must be {_FORMS.get(limits['pattern'], 'text that matches ' + limits['pattern'])}"
        case "literal_error":
            return choice(error, given)[0]
        case "model_type" | "dict_type":
            return f"a block of keys is needed, not {given}"
        case "value_error":
            return str(limits["error"])
        case _:
            return error["msg"]


def choice(error: Mapping[str, Any], given: str) -> tuple[str, str | None]:
    """The message for a value that is none of those which are possible, and the one that it is nearest to."""
    choices = re.findall(r"'([^']*)'", error["ctx"]["expected"])
    near = get_close_matches(str(error["input"]).lower(), choices, 1)
    return f"{given} is not one of: {', '.join(choices)}", near[0] if near else None


def shown(value: Any, plain: str | None = None) -> str:
    """A value, shortened; `plain`: how it is written where it stands."""
    if isinstance(value, dict):
        return "a block of keys"
    if isinstance(value, (list, tuple)):
        return "a list"
    text = plain if plain is not None else f'"{value}"'
    return f"`{text}`" if len(text) <= 40 else f"`{text[:39]}…`"
