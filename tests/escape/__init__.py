"""Escape and abuse from inside real boxes of any provider, judged by their effect on the host."""

import pytest

pytest.register_assert_rewrite("escape.abuse", "escape.attempts", "escape.boxes", "escape.escapes")
