"""One mesh with a running job, and one Chromium, for all tests of the page."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from dmsc.client.client import Client
from tests.integration.mesh.conftest import Mesh, start_mesh, stop_mesh, tiny_job
from tests.patience import PATIENCE_S

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PATIENCE_MS = PATIENCE_S * 1e3
VIEWER = "a-viewer's-token"


@dataclass
class Site:
    """The mesh, its door, and the job that runs."""

    mesh: Mesh
    url: str
    token: str
    job: str

    @property
    def client(self) -> Client:
        return self.mesh.client


@pytest.fixture(scope="module")  # its loop runs in this thread until it ends: no asyncio test beside it
def browser() -> Iterator[Browser]:
    sync = pytest.importorskip("playwright.sync_api", reason="the page's tests need playwright: dmsc[dev]")
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip(f"the page's tests need a Chromium on the PATH: one of {', '.join(NAMES)}")
    with sync.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def site(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """After `browser`: without one, nothing is started in vain."""
    state = tmp_path_factory.mktemp("dashboard") / "state"
    state.mkdir()
    digest = hashlib.sha256(VIEWER.encode()).hexdigest()
    (state / "tokens.yaml").write_text(f"users:\n  - {{name: vera, role: viewer, token_sha256: {digest}}}\n")
    mesh = start_mesh(state, "--slots", "4")
    try:
        spec = tiny_job(
            "seen",
            model={
                "factory": "workers.models.padded:padded_gpt",
                "args": {"layers": 2, "width": 32, "heads": 2, "context": 32, "pad_ms": 60},
            },
            training={"steps": 100_000},
            parallel={"stages": 2, "replicas": 2},
        )
        job = mesh.client.submit(spec).job
        for event in mesh.client.events(job):
            if event.result is not None:
                break
        door = next(one.endpoint.address for one in mesh.client.mesh().services if one.sid == "gateway-a")
        yield Site(mesh, door, (state / "token").read_text().strip(), job)
    finally:
        stop_mesh(mesh)


@dataclass
class Watched:
    """What a page did beside what it showed."""

    errors: list[str] = field(default_factory=list)
    hosts: set[str] = field(default_factory=set)
    addresses: list[str] = field(default_factory=list)

    def error(self, error: Any) -> None:
        self.errors.append(str(error))

    def console(self, line: Any) -> None:
        if line.type == "error":
            self.errors.append(line.text)

    def request(self, request: Any) -> None:
        self.hosts.add(urlsplit(request.url).netloc)
        self.addresses.append(request.url)


Open = Callable[..., "Page"]


@pytest.fixture(scope="module")
def tab(browser: Browser) -> Iterator[Page]:
    """One for all tests: another one, with a process of its own, costs more than what most tests do in it."""
    context = browser.new_context()
    page = context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    yield page
    context.close()


@pytest.fixture(scope="module")
def loaded() -> list[str]:
    """The door and the token with which the page has come, once it has."""
    return []


@pytest.fixture
def open_page(tab: Page, loaded: list[str], site: Site) -> Iterator[Open]:
    """`page = open_page(view="jobs", width=360, token=VIEWER, dark=True)`; checked when the test ends.

    The test before leaves the page as it is: it is loaded anew only for another token or door, for its files
    count at the door like requests of a user.
    `moving`: with microbatches as dots that move, which is drawn 60 times a second, by this machine's cores.
    """
    watched = Watched()
    doors: set[str] = set()
    listeners: dict[str, Callable[[Any], None]] = {
        "pageerror": watched.error,
        "console": watched.console,
        "request": watched.request,
    }
    for event, listener in listeners.items():
        tab.on(event, listener)  # type: ignore[call-overload]  # one overload for each name

    def opened(
        view: str = "mesh",
        *,
        width: int = 1280,
        token: str | None = None,
        dark: bool = False,
        moving: bool = False,
        door: str = "",
    ) -> Page:
        tab.set_viewport_size({"width": width, "height": 800})
        tab.emulate_media(
            color_scheme="dark" if dark else "light",
            reduced_motion="no-preference" if moving else "reduce",
        )
        wanted = [door or site.url, token or site.token]
        doors.add(urlsplit(wanted[0]).netloc)
        if loaded != wanted:
            tab.goto("{}/dashboard/#token={}".format(*wanted))
            if loaded[:1] == wanted[:1]:  # another fragment alone is the same page
                tab.reload()
            loaded[:] = wanted
        tab.wait_for_selector("#link-state .s-live")
        tab.click(f"nav a[href='#/{view}']")
        tab.wait_for_selector(f"nav a[href='#/{view}'][aria-current=page]")
        return tab

    yield opened
    tab.evaluate("localStorage.clear()")  # the colours that were chosen; not the token
    if loaded[:1] != [site.url]:  # what it asks that door for from now on is not the next test's
        tab.goto("about:blank")
        loaded.clear()
    for event, listener in listeners.items():
        tab.remove_listener(event, listener)
    assert watched.hosts <= doors, "the page asked somebody else"
    assert not [url for url in watched.addresses if site.token in url.partition("#")[0]]
    provoked = ("403", "net::ERR_")  # a refusal that a test asked for, a connection that it cut
    assert [error for error in watched.errors if not any(one in error for one in provoked)] == []
