"""LangChain's standard suite for sandboxes, on the provider of the settings; runs in the framework's environment."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import pytest
from langchain_tests.integration_tests import SandboxIntegrationTests

import skerry
from skerry.adapters.langchain import SkerrySandbox


class TestSkerrySandbox(SandboxIntegrationTests):
    @pytest.fixture(scope="class")
    def sandbox(self) -> Iterator[SkerrySandbox]:
        with skerry.Sandbox(**json.loads(os.environ.get("SUITE_SANDBOX", "{}"))) as sandbox:
            if not sandbox.exec("command -v python").ok:  # which two of the tests call, and images of Debian's have not
                sandbox.exec("ln -s $(command -v python3) /usr/local/bin/python", user="root")
            yield SkerrySandbox(sandbox)
