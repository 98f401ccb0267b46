"""Requests held against an API description: as much of Swagger 2.0 as Firecracker's description uses."""

from __future__ import annotations

from typing import Any

_TYPES = {"string": str, "boolean": bool, "integer": int, "array": list, "object": dict}


class Description:
    """Says what is wrong with a request. Fields that the description does not have are wrong, as they are to
    Firecracker."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._document = document

    def operation(self, method: str, path: str) -> dict[str, Any] | None:
        for template, methods in self._document["paths"].items():
            if _matches(template, path):
                return methods.get(method.lower())
        return None

    def problems(self, method: str, path: str, body: Any) -> list[str]:
        operation = self.operation(method, path)
        if operation is None:
            return [f"there is no {method} {path}"]
        taken = [each for each in operation.get("parameters", ()) if each["in"] == "body"]
        if not taken:
            return [] if body is None else ["it takes no body"]
        if body is None:
            return ["it needs a body"] if taken[0].get("required") else []
        return self._problems(taken[0]["schema"], body, "body")

    def fields(self, method: str, path: str) -> tuple[list[str], list[str]]:
        """All that the body may have, and what it must."""
        operation = self.operation(method, path) or {}
        for each in operation.get("parameters", ()):
            if each["in"] == "body":
                schema = self._resolved(each["schema"])
                return list(schema.get("properties", ())), list(schema.get("required", ()))
        return [], []

    def _resolved(self, schema: dict[str, Any]) -> dict[str, Any]:
        while "$ref" in schema:
            schema = self._document["definitions"][schema["$ref"].rpartition("/")[2]]
        return schema

    def _problems(self, schema: dict[str, Any], value: Any, where: str) -> list[str]:
        schema = self._resolved(schema)
        wanted = _TYPES[schema["type"]]
        if not isinstance(value, wanted) or (wanted is int and isinstance(value, bool)):
            return [f"{where} is {value!r}, not of type {schema['type']}"]
        found = []
        if value not in schema.get("enum", [value]):
            found.append(f"{where} is {value!r}, not one of {schema['enum']}")
        if wanted is int and not schema.get("minimum", value) <= value <= schema.get("maximum", value):
            found.append(f"{where} is {value}, which is out of bounds")
        if wanted is list:
            for index, item in enumerate(value):
                found += self._problems(schema["items"], item, f"{where}[{index}]")
        if wanted is dict:
            found += self._object_problems(schema, value, where)
        return found

    def _object_problems(self, schema: dict[str, Any], value: dict[str, Any], where: str) -> list[str]:
        known = schema.get("properties", {})
        others = schema.get("additionalProperties", False)
        found = [f"{where} lacks {name}" for name in schema.get("required", ()) if name not in value]
        for name, item in value.items():
            if name in known:
                found += self._problems(known[name], item, f"{where}.{name}")
            elif isinstance(others, dict):
                found += self._problems(others, item, f"{where}.{name}")
            elif not others:
                found.append(f"{where} has {name}, which nobody knows")
        return found


def _matches(template: str, path: str) -> bool:
    wanted, given = template.split("/"), path.split("/")
    pairs = zip(wanted, given, strict=False)
    return len(wanted) == len(given) and all(a == b or (a.startswith("{") and b) for a, b in pairs)
