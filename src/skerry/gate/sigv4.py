"""AWS Signature Version 4 as a hook: `Secret(hosts=["*.amazonaws.com"], hook="skerry.gate.sigv4:sign")`, whose value is
the secret access key.

The box signs with its placeholder as any AWS client does, which proves nothing. The hook signs the same headers again,
for the same date, region and service, with the real key. So the client needs to know nothing of it.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from email.utils import parsedate_to_datetime
from urllib.parse import quote, unquote

from skerry.gate.base import Refused
from skerry.gate.hooks import Identity, NeedsBody, Request

_ALGORITHM = "AWS4-HMAC-SHA256"
_GIVEN = re.compile(
    rf"{_ALGORITHM}\s+Credential=(?P<id>[^/,\s]+)/"
    r"(?P<scope>(?P<date>\d{8})/(?P<region>[^/,\s]+)/(?P<service>[^/,\s]+)"
    r"/aws4_request)\s*,\s*SignedHeaders=(?P<headers>[^,\s]+)\s*,\s*Signature=\S*"
)
_STORES = ("s3", "s3express", "s3-object-lambda", "s3-outposts")
"""Services whose paths are names of objects, and taken as they are."""
_UNRESERVED = "-_.~"


def sign(request: Request, identity: Identity) -> Request:
    """Sign a request that the box has signed; others, as of those who need not sign, pass as they are. Raises Refused
    for one that cannot be signed in its place, NeedsBody where no header has the digest of the body."""
    given = request.header("Authorization")
    if given is None or not given.startswith("AWS4-"):
        return request
    match = _GIVEN.fullmatch(given)
    if match is None:
        raise Refused(f"only signatures of the form {_ALGORITHM} can be made for a box")
    names = match["headers"].lower().split(";")
    if len(set(names)) < len(names):  # each would be its header once more
        raise Refused("a signature names each header once")
    canonical = "\n".join(
        (
            request.method,
            _path(request.target, match["service"]),
            _query(request.target),
            *(f"{name}:{_values(request, name)}" for name in names),
            "",
            ";".join(names),
            _digest(request),
        )
    )
    to_sign = "\n".join((_ALGORITHM, _time(request), match["scope"], _sha256(canonical.encode())))
    key = f"AWS4{identity.value.reveal()}".encode()
    for part in (match["date"], match["region"], match["service"], "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.digest(key, to_sign.encode(), "sha256").hex()
    credential = f"Credential={match['id']}/{match['scope']}"
    return request.but(
        "Authorization", f"{_ALGORITHM} {credential}, SignedHeaders={';'.join(names)}, Signature={signature}"
    )


def _path(target: str, service: str) -> str:
    path = target.partition("?")[0]
    if service in _STORES:
        return quote(unquote(path), safe=f"/{_UNRESERVED}")
    kept: list[str] = []
    for part in path.split("/"):
        if part == "..":
            del kept[-1:]
        elif part not in ("", "."):
            kept.append(part)
    end = "/" if kept and path.endswith("/") else ""
    return quote("/" + "/".join(kept) + end, safe=f"/{_UNRESERVED}")


def _query(target: str) -> str:
    pairs = (pair.partition("=") for pair in target.partition("?")[2].split("&") if pair)
    spelled = ((_spelled(name), _spelled(value)) for name, _, value in pairs)
    return "&".join(f"{name}={value}" for name, value in sorted(spelled))


def _spelled(text: str) -> str:
    """Text in its one percent-encoding."""
    return quote(unquote(text), safe=_UNRESERVED)


def _values(request: Request, name: str) -> str:
    found = [" ".join(value.split()) for key, value in request.headers if key.lower() == name]
    if not found:
        raise Refused(f"the request has no header {name}, which its signature names")
    return ",".join(found)


def _digest(request: Request) -> str:
    given = request.header("X-Amz-Content-SHA256")
    if given is None:
        if request.body is None:
            raise NeedsBody
        return _sha256(request.body)
    if given.startswith("STREAMING-AWS4"):
        raise Refused("a body whose pieces are signed one by one cannot be signed for a box: send it unsigned over TLS")
    return given


def _time(request: Request) -> str:
    if given := request.header("X-Amz-Date"):
        return given
    try:
        return parsedate_to_datetime(request.header("Date") or "").strftime("%Y%m%dT%H%M%SZ")
    except ValueError:
        raise Refused("the request has neither X-Amz-Date nor a Date") from None


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
