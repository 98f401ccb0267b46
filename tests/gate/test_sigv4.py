"""AWS's published test suite for Signature Version 4, as a box's client and the hook see it."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from skerry.gate.base import Refused
from skerry.gate.hooks import Identity, NeedsBody, Request
from skerry.gate.secrets import Value
from skerry.gate.sigv4 import sign
from skerry.model.spec import new_id

KEY = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"
HOST = ("Host", "example.amazonaws.com")
DATE = ("X-Amz-Date", "20150830T123600Z")
FORM = "application/x-www-form-urlencoded"
UNRESERVED = "-._~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
TOKEN = (
    "AQoDYXdzEPT//////////wEXAMPLEtc764bNrC9SAPBSM22wDOk4x4HIZ8j4FZTwdQWLWsKWHGBuFqwAeMicRXmxfpSPfIeoIYRqTflfKD8YUuwth"
    "Ax7mSEI/qkPpKPi/kMcGdQrmGdeehM4IC1NtBmUpp2wUE8phUZampKsburEDy0KPkyQDYwT7WZ0wq5VSXDvp75YU9HFvlRd8Tx6q6fE8YQcHNVXAki"
    "Y9q6d+xo0rKwT38xVqr7ZD0u0iPPkUL64lIZbqBAz+scqKmlzm8FDrypNC9Yjc8fPOLn9FX9KSYvKTr4rvx3iSIlTJabIQwj2ICCR/oLxBA=="
)


class Vector(NamedTuple):
    """A request of the suite, and the signature that it has to get."""

    signature: str
    target: str = "/"
    method: str = "GET"
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""


def mine(*values: str) -> tuple[tuple[str, str], ...]:
    return tuple(("My-Header1", value) for value in values)


VANILLA = "5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31"
POSTED = "5da7c1a2acd57cee7505fc6676e4e544621c30862966e37dddb68e92efbe5d6b"
SUITE = {
    "get-vanilla": Vector(VANILLA),
    "get-header-key-duplicate": Vector(
        "c9d5ea9f3f72853aea855b47ea873832890dbdd183b4468f858259531a5138ea",
        headers=mine("value2", "value2", "value1"),
    ),
    "get-header-value-order": Vector(
        "08c7e5a9acfcfeb3ab6b2185e75ce8b1deb5e634ec47601a50643f830c755c01",
        headers=mine("value4", "value1", "value3", "value2"),
    ),
    "get-header-value-trim": Vector(
        "acc3ed3afb60bb290fc8d2dd0098b9911fcaa05412b367055dee359757a9c736",
        headers=(*mine(" value1"), ("My-Header2", ' "a   b   c"')),
    ),
    "get-unreserved": Vector("07ef7494c76fa4850883e2b006601f940f8a34d404d0cfa977f52a65bbf5f24f", f"/{UNRESERVED}"),
    "get-utf8": Vector("8318018e0b0f223aa2bbf98705b62bb787dc9c0e678f255a891fd03141be5d85", "/ሴ"),
    "get-vanilla-empty-query-key": Vector(
        "a67d582fa61cc504c4bae71f336f98b97f1ea3c7a6bfe1b6e45aec72011b9aeb", "/?Param1=value1"
    ),
    "get-vanilla-query-order-encoded": Vector(
        "371d3713e185cc334048618a97f809c9ffe339c62934c032af5a0e595648fcac",
        "/?Param-3=Value3&Param=Value2&%E1%88%B4=Value1",
    ),
    "get-vanilla-query-order-key-case": Vector(
        "b97d918cfa904a5beff61c982a1b6f458b799221646efd99d3219ec94cdf2500", "/?Param2=value2&Param1=value1"
    ),
    "get-vanilla-query-order-key": Vector(
        "eedbc4e291e521cf13422ffca22be7d2eb8146eecf653089df300a15b2382bd1", "/?Param1=value2&Param1=Value1"
    ),
    "get-vanilla-query-order-value": Vector(
        "5772eed61e12b33fae39ee5e7012498b51d56abc0abb7c60486157bd471c4694", "/?Param1=value2&Param1=value1"
    ),
    "get-vanilla-query-unreserved": Vector(
        "9c3e54bfcdf0b19771a7f523ee5669cdf59bc7cc0884027167c21bb143a40197", f"/?{UNRESERVED}={UNRESERVED}"
    ),
    "get-vanilla-utf8-query": Vector("2cdec8eed098649ff3a119c94853b13c643bcf08f8b0a1d91e12c9027818dd04", "/?ሴ=bar"),
    "get-relative": Vector(VANILLA, "/example/.."),
    "get-relative-relative": Vector(VANILLA, "/example1/example2/../.."),
    "get-slash": Vector(VANILLA, "//"),
    "get-slash-dot-slash": Vector(VANILLA, "/./"),
    "get-slash-pointless-dot": Vector("ef75d96142cf21edca26f06005da7988e4f8dc83a165a80865db7089db637ec5", "/./example"),
    "get-slashes": Vector("9a624bd73a37c9a373b5312afbebe7a714a789de108f0bdfe846570885f57e84", "//example//"),
    "get-space": Vector("652487583200325589f1fba4c7e578f72c47cb61beeca81406b39ddec1366741", "/example space/"),
    "get-special-character": Vector(
        "a853c9b21b528b19643d00910d35b83a10c366a10833ceefb45edd6c80e40f27", "/example/$delete"
    ),
    "post-vanilla": Vector(POSTED, method="POST"),
    "post-vanilla-query": Vector(
        "28038455d6de14eafc1f9222cf5aa6f1a96197d7deb8263271d420d138af7f11", "/?Param1=value1", "POST"
    ),
    "post-header-key-sort": Vector(
        "c5410059b04c1ee005303aed430f6e6645f61f4dc9e1461ec8f8916fdf18852c", method="POST", headers=mine("value1")
    ),
    "post-header-value-case": Vector(
        "cdbc9802e29d2942e5e10b5bccfdd67c5f22c7c4e8ae67b53629efa58b974b7d", method="POST", headers=mine("VALUE1")
    ),
    "post-sts-header-before": Vector(
        "85d96828115b5dc0cfc3bd16ad9e210dd772bbebba041836c64533a82be05ead",
        method="POST",
        headers=(("X-Amz-Security-Token", TOKEN),),
    ),
    "post-x-www-form-urlencoded": Vector(
        "ff11897932ad3f4e8b18135d722051e5ac45fc38421b1da7b9d196a0fe09473a",
        method="POST",
        headers=(("Content-Type", FORM),),
        body=b"Param1=value1",
    ),
    "post-x-www-form-urlencoded-parameters": Vector(
        "1a72ec8f64bd914b0e42e42607c7fbce7fb2c7465f63e3092b3b0d39fa77a6fe",
        method="POST",
        headers=(("Content-Type", f"{FORM}; charset=utf8"),),
        body=b"Param1=value1",
    ),
}


def signed_by_the_box(vector: Vector, service: str = "service") -> Request:
    """The request as a client in the box sends it, whose signature is made with a placeholder."""
    headers = (HOST, *vector.headers, DATE)
    names = ";".join(sorted({name.lower() for name, _ in headers}))
    credential = f"Credential=AKIDEXAMPLE/20150830/us-east-1/{service}/aws4_request"
    given = f"AWS4-HMAC-SHA256 {credential}, SignedHeaders={names}, Signature={'0' * 64}"
    all_headers = (*headers, ("Authorization", given))
    return Request(method=vector.method, target=vector.target, headers=all_headers, body=vector.body)


def identity() -> Identity:
    return Identity(
        sandbox=new_id(), labels={}, host=HOST[1], port=443, secret="AWS_SECRET_ACCESS_KEY", value=Value(KEY)
    )


@pytest.mark.parametrize("name", SUITE)
def test_a_request_of_the_published_suite_gets_its_published_signature(name: str) -> None:
    given = signed_by_the_box(SUITE[name])
    made = sign(given, identity())
    wanted = (given.header("Authorization") or "").replace("0" * 64, SUITE[name].signature)
    assert made.header("Authorization") == wanted
    assert [pair for pair in made.headers if pair[0] != "Authorization"] == list(given.headers[:-1])
    assert (made.method, made.target, made.body) == (given.method, given.target, given.body)


def test_the_example_of_the_documentation_of_s3_gets_its_signature() -> None:
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    request = Request(
        method="GET",
        target="/test.txt",
        headers=(
            ("Host", "examplebucket.s3.amazonaws.com"),
            ("Range", "bytes=0-9"),
            ("x-amz-content-sha256", empty),
            ("x-amz-date", "20130524T000000Z"),
            (
                "Authorization",
                "AWS4-HMAC-SHA256 Credential=AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request,"
                "SignedHeaders=host;range;x-amz-content-sha256;x-amz-date,Signature=0",
            ),
        ),
    )
    who = Identity(
        sandbox=new_id(),
        labels={},
        host="examplebucket.s3.amazonaws.com",
        port=443,
        secret="KEY",
        value=Value("wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"),
    )
    made = sign(request, who).header("Authorization") or ""
    assert made.endswith("Signature=f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41")


def test_a_body_without_a_digest_is_asked_for() -> None:
    given = signed_by_the_box(SUITE["post-vanilla"])
    with pytest.raises(NeedsBody):
        sign(Request(method="POST", target="/", headers=given.headers), identity())


def test_names_of_objects_are_not_made_simpler() -> None:
    plain = sign(signed_by_the_box(Vector("", "/a/b"), "s3"), identity())
    odd = sign(signed_by_the_box(Vector("", "/a/./b"), "s3"), identity())
    assert plain.header("Authorization") != odd.header("Authorization")


@pytest.mark.parametrize("given", [None, "Bearer x", "Basic eDp5"])
def test_what_is_not_signed_passes_as_it_is(given: str | None) -> None:
    headers = (HOST,) if given is None else (HOST, ("Authorization", given))
    request = Request(method="GET", target="/", headers=headers)
    assert sign(request, identity()) is request


@pytest.mark.parametrize(
    ("header", "value"),
    [
        (
            "Authorization",
            "AWS4-ECDSA-P256-SHA256 Credential=A/20150830/s/aws4_request, SignedHeaders=a, Signature=0",
        ),
        ("X-Amz-Content-SHA256", "STREAMING-AWS4-HMAC-SHA256-PAYLOAD"),
    ],
)
def test_what_cannot_be_signed_for_a_box_is_refused(header: str, value: str) -> None:
    with pytest.raises(Refused):
        sign(signed_by_the_box(SUITE["get-vanilla"]).but(header, value), identity())


def test_a_header_that_is_named_again_and_again_is_refused() -> None:
    given = signed_by_the_box(SUITE["get-vanilla"])
    named = (given.header("Authorization") or "").replace("host;", "host;" * 9)
    with pytest.raises(Refused, match="once"):
        sign(given.but("Authorization", named), identity())


def test_a_header_that_is_named_and_missing_is_refused() -> None:
    given = signed_by_the_box(SUITE["get-vanilla"])
    named = (given.header("Authorization") or "").replace("host;", "absent;host;")
    with pytest.raises(Refused, match="absent"):
        sign(given.but("Authorization", named), identity())
