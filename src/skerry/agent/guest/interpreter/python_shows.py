"""Forms in which the built-in Python kernel shows a value."""

from __future__ import annotations

import io
import sys
import traceback

from skerry_agent import python_forms  # type: ignore[import-not-found]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_MAX_TEXT = 1 << 20

METHODS = (
    ("text/html", "_repr_html_"),
    ("text/markdown", "_repr_markdown_"),
    ("image/svg+xml", "_repr_svg_"),
    ("image/png", "_repr_png_"),
    ("image/jpeg", "_repr_jpeg_"),
    ("application/pdf", "_repr_pdf_"),
    ("text/latex", "_repr_latex_"),
    ("application/json", "_repr_json_"),
    ("application/javascript", "_repr_javascript_"),
)


def shorten(text: str, limit: int = _MAX_TEXT) -> str:
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= limit else text[:limit] + f"\n[... {len(text) - limit} letters left out ...]"


def bundle_of(value: object) -> tuple[dict[str, Any], dict[str, Any]]:
    """All that an object can be shown as, by media type, and what is known of each. What fails is left out."""
    data: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    kind = type(value)
    if not isinstance(value, type):
        own = _try(value, "_repr_mimebundle_", include=None, exclude=None)
        if isinstance(own, tuple) and len(own) == 2:
            own, metadata = own[0], dict(own[1])
        if isinstance(own, dict):
            data.update(own)
        for media, method in METHODS:
            if media not in data and getattr(kind, method, None) is not None:
                shown = _try(value, method)
                if isinstance(shown, tuple) and len(shown) == 2:
                    shown, metadata[media] = shown
                if shown is not None:
                    data[media] = shown
        if "image/png" not in data and is_figure(value):
            data["image/png"] = png_of(value)
    for media, form in python_forms.FORMS:
        if (shown := form(value)) is not None:
            data[media] = shown
    if "text/plain" not in data:
        data["text/plain"] = shorten(repr(value))
    return {str(media): _carried(shown) for media, shown in data.items()}, metadata


def _try(value: object, method: str, **arguments: Any) -> Any:
    found = getattr(value, method, None)
    if not callable(found):
        return None
    try:
        return found(**arguments)
    except NotImplementedError:
        return None
    except Exception:
        traceback.print_exc()
        return None


def _carried(shown: Any) -> Any:
    if isinstance(shown, (bytes, bytearray, memoryview)):
        import base64

        return base64.b64encode(shown).decode()
    return shorten(shown, 1 << 24) if isinstance(shown, str) else shown


def is_figure(value: object) -> bool:
    module = sys.modules.get("matplotlib.figure")
    return module is not None and isinstance(value, module.Figure)


def png_of(figure: Any) -> bytes:
    data = io.BytesIO()
    figure.savefig(data, format="png", bbox_inches="tight")
    return data.getvalue()
