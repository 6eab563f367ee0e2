"""The live page in a real browser: what it shows, that it loads nothing else, and that it needs a key."""

from __future__ import annotations

import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from dspark.server import ServerConfig
from dspark.server.app import CSP
from tests.server.conftest import MODEL, Live

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
STATIC = Path(__file__).parents[2] / "dspark" / "server" / "static"
KEY = "a-key"


# without a browser


@pytest.mark.parametrize(
    ("path", "media"), [("/", "text/html"), ("/page.css", "text/css"), ("/page.js", "text/javascript")]
)
def test_files_and_their_policy(live: Live, path: str, media: str) -> None:
    answer = live.get(path)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith(media)
    assert answer.headers["content-security-policy"] == CSP
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "no-store"
    assert "unsafe" not in CSP


def test_the_page_names_nothing_outside_and_nothing_inline() -> None:
    html = (STATIC / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"<script(?![^>]*\bsrc=)", html)
    assert not re.search(r"\sstyle=|<style|\son\w+=", html)
    for path in STATIC.iterdir():
        urls = set(re.findall(r"https?://[^\s\"'`]+", path.read_text(encoding="utf-8")))
        assert urls <= {"http://www.w3.org/2000/svg", "http://user:key@host"}
    script = (STATIC / "page.js").read_text(encoding="utf-8")
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|Function\(", script)


def test_status_is_what_the_page_reads(live: Live) -> None:
    live.post("/v1/completions", {"model": MODEL, "prompt": "the fox", "max_tokens": 30, "temperature": 0})
    status = live.get("/status").json()
    script = (STATIC / "page.js").read_text(encoding="utf-8")
    for name in set(re.findall(r"\bs\.(\w+)", script)):
        assert name in status
    for name in set(re.findall(r"\bs\.stats\.(\w+)", script)):
        assert name in status["stats"]
    for name in set(re.findall(r"\bs\.recent\.(\w+)", script)):
        assert name in status["recent"]
    assert status["rounds"][-1]["tokens"] >= 1


def test_the_stream_sends_the_status_and_ends_with_the_server(serving: Callable[..., Any]) -> None:
    with serving() as live, httpx.stream("GET", f"{live.url}/status/stream", timeout=20) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith('data: {"version"')
        live.server.stop()
        rest = list(lines)
    assert "event: end" in rest


def test_only_so_many_pages_watch(serving: Callable[..., Any]) -> None:
    with serving(ServerConfig(model_name=MODEL, max_watchers=1)) as live:
        with httpx.stream("GET", f"{live.url}/status/stream") as answer:
            lines = answer.iter_lines()  # kept: the connection closes with it
            next(lines)
            assert live.get("/status/stream").status_code == 503
        ends = time.monotonic() + 10
        while True:  # a place is free once the server has seen the first one leave
            with httpx.stream("GET", f"{live.url}/status/stream") as answer:
                if answer.status_code == 200:
                    break
            assert time.monotonic() < ends


# with one


class Seen:
    """What a page did."""

    def __init__(self, page: Any) -> None:
        self.errors: list[str] = []
        self.urls: set[str] = set()
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        page.on("request", lambda request: self.urls.add(request.url))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no Chromium here")
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture(scope="module")
def busy(serving: Callable[..., Any]) -> Iterator[Live]:
    """A server with a key, whose requests take long enough to be seen."""
    with serving(ServerConfig(model_name=MODEL, api_keys=[KEY]), cost=table()) as live:
        target: Any = live.decoder.engine.parts.target
        forward = target.forward

        def late(*args: Any) -> Any:
            time.sleep(0.03)
            return forward(*args)

        target.forward = late
        yield live


def table() -> Any:
    from dspark._sched import CostTable

    return CostTable([(1, 0.010), (4, 0.011), (8, 0.014), (16, 0.02), (64, 0.06)], mode="interpolated")


def start_requests(live: Live, count: int = 3) -> list[Any]:
    """Open streams that run until they are closed."""
    client = live.client(KEY)
    prompt = "the quick brown fox jumps over the lazy dog the quick brown fox jumps over"
    return [
        client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=200, temperature=0, stream=True, extra_body={"ignore_eos": True}
        )
        for _ in range(count)
    ]


class Gate:
    """Lets a target run so many forwards and holds the next one, with the engine in the middle of its work."""

    def __init__(self, live: Live, free: int) -> None:
        self._free, self._entered, self._changed = free, 0, threading.Condition()
        target: Any = live.decoder.engine.parts.target
        forward = target.forward

        def gated(*args: Any) -> Any:
            with self._changed:
                self._entered += 1
                self._changed.notify_all()
                assert self._changed.wait_for(lambda: self._entered <= self._free, 120)
            return forward(*args)

        target.forward = gated

    def open(self, more: int) -> None:
        """Let ``more`` forwards run and come back when the one behind them is held."""
        with self._changed:
            self._free += more
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._entered > self._free, 120)

    def leave_open(self) -> None:
        with self._changed:
            self._free = 10**9
            self._changed.notify_all()


def test_it_shows_a_running_engine(serving: Callable[..., Any], browser: Any) -> None:
    """What stands in the page is what ``/status`` says of three requests whose engine is held in mid-decoding."""
    prompt = "the quick brown fox jumps over the lazy dog the quick brown fox jumps over"
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 150, "temperature": 0, "ignore_eos": True}
    with (
        serving(ServerConfig(model_name=MODEL), cost=table(), refine_cost=False, gamma=4) as live,
        ThreadPoolExecutor(3) as pool,
    ):
        gate = Gate(live, 0)
        try:
            answers = [pool.submit(live.post, "/v1/completions", body) for _ in range(3)]
            ends = time.monotonic() + 60
            while live.service.live < 3:
                assert time.monotonic() < ends
                time.sleep(0.01)
            gate.open(3)
            for _ in range(20):  # at most five tokens each: none ends
                status = live.get("/status").json()
                if len(status["requests"]) == 3 and any(r["survival"] for r in status["requests"]):
                    break
                gate.open(1)  # the last round drafted nothing
            else:
                raise AssertionError("nothing was drafted")
            page = browser.new_page()
            seen = Seen(page)
            page.goto(live.url)
            page.wait_for_selector("#requests tr:nth-child(3)", timeout=60_000)
            check_plots(page, status)
            check_requests(page, status)
            assert "running / slots3 / 4" in page.text_content("#now")
            gate.leave_open()
            assert [a.result(60).json()["usage"]["completion_tokens"] for a in answers] == [150] * 3
            page.wait_for_selector("#idle:not([hidden])", timeout=60_000)
            assert page.locator("#requests tr").count() == 0
            assert "finished3 length" in page.text_content("#now")
            assert seen.errors == []
            page.close()
        finally:
            gate.leave_open()


def check_plots(page: Any, status: dict[str, Any]) -> None:
    """Acceptance by position, verify budget, cost curve."""
    rates, offered = status["recent"]["acceptance"], status["recent"]["offered"]
    assert len(rates) >= 1
    for name, value in status["recent"].items():  # so far, the last rounds are all
        assert value == pytest.approx(status["stats"][name])
    titles = page.locator("#acceptance rect.bar title").all_text_contents()
    assert titles == [
        f"position {k}: {rate:.2f} of {n} offered" for k, (rate, n) in enumerate(zip(rates, offered, strict=True), 1)
    ]
    heights = [float(bar.get_attribute("height")) for bar in page.locator("#acceptance rect.bar").all()]
    assert heights == pytest.approx([rate * (200 - 12 - 32) for rate in rates])
    rounds = [r for r in status["rounds"] if r["requests"]]
    assert any(r["budget"] for r in rounds)
    assert page.locator("#budget circle").count() == len(rounds) >= 2
    assert page.locator("#budget circle.last").count() == 1
    curve = page.locator("#cost path.cost")
    assert curve.count() == 1
    assert len(re.findall("[ML]", curve.get_attribute("d"))) == len(status["cost"]["points"]) > 10
    assert page.locator("#cost circle.last").count() == 1
    points = status["cost"]["points"]
    shown = [r["forward"] for r in status["rounds"] if 0 < r["executed"] <= points[-1][0]]
    highest = max([seconds for _, seconds in points] + shown)
    places = [float(dot.get_attribute("cy")) for dot in page.locator("#cost circle").all()]
    assert places == pytest.approx([200 - 32 - (200 - 12 - 32) * seconds / highest for seconds in shown])


def check_requests(page: Any, status: dict[str, Any]) -> None:
    """A row for each live request, with the survival of its last draft."""
    assert len(status["requests"]) == 3
    drawn = 0
    for row, request in zip(page.locator("#requests tr").all(), status["requests"], strict=True):
        cells = row.locator("td").all_text_contents()
        output = f"{request['output_tokens']} / {request['max_tokens']}"
        assert 0 < request["output_tokens"] < 150
        assert cells[:4] == [request["id"], "greedy", str(request["prompt_tokens"]), output]
        assert cells[5:] == [str(request["verified"]), str(request["accepted"])]
        label = row.locator("svg").get_attribute("aria-label")
        assert [float(a) for a in label.split(", ") if a] == request["survival"]
        assert row.locator("svg rect").count() == len(request["survival"])
        assert row.locator("svg rect.bar:not(.skipped)").count() == min(request["verified"], len(request["survival"]))
        drawn += len(request["survival"])
    assert drawn > 0


@pytest.mark.slow
@pytest.mark.soak
def test_it_shows_what_the_scheduler_does(busy: Live, browser: Any, tmp_path: Path) -> None:
    streams = start_requests(busy)
    context = browser.new_context(
        http_credentials={"username": "any", "password": KEY}, viewport={"width": 1280, "height": 860}
    )
    page = context.new_page()
    seen = Seen(page)
    page.goto(busy.url)
    page.wait_for_selector("#connection[data-state=live]", timeout=20_000)
    page.wait_for_selector("#requests tr:nth-child(3)", timeout=20_000)
    page.wait_for_selector("#requests td svg rect.bar", state="attached", timeout=20_000)
    assert MODEL in page.inner_text("#what")
    assert page.locator("#acceptance rect.bar").count() >= 1
    assert page.locator("#budget circle").count() >= 1
    assert page.locator("#cost path.cost").count() == 1
    assert page.locator("#cost circle.last").count() == 1
    first = page.inner_text("#requests tr:first-child td:nth-child(4)")
    page.wait_for_function("old => document.querySelector('#requests td:nth-child(4)').textContent !== old", arg=first)
    assert seen.errors == []
    assert {url.split("/")[2] for url in seen.urls} == {busy.url.split("/")[2]}
    page.screenshot(path=tmp_path / "page.png", full_page=True)
    for stream in streams:
        stream.close()
    busy.settled()
    page.wait_for_selector("#idle:not([hidden])", timeout=10_000)
    context.close()


def test_a_browser_without_a_key_sees_nothing(busy: Live, browser: Any) -> None:
    context = browser.new_context()
    page = context.new_page()
    with pytest.raises(Exception, match="INVALID_AUTH_CREDENTIALS"):
        page.goto(busy.url)
    context.close()
    for path in ("/", "/page.js", "/page.css", "/status", "/status/stream"):
        answer = httpx.get(busy.url + path)
        assert answer.status_code == 401
        assert MODEL not in answer.text


def test_credentials_in_the_address_work(busy: Live, browser: Any) -> None:
    context = browser.new_context()
    page = context.new_page()
    page.goto(busy.url.replace("http://", f"http://any:{KEY}@"))
    page.wait_for_selector("#connection[data-state=live]", timeout=20_000)
    context.close()


def test_an_injected_script_does_not_run(busy: Live, browser: Any) -> None:
    """The policy holds: a script that somebody got into the page is not run."""
    context = browser.new_context(http_credentials={"username": "any", "password": KEY})
    page = context.new_page()
    page.goto(busy.url)
    page.evaluate(
        "() => { const s = document.createElement('script');"
        " s.textContent = 'window.hit = 1'; document.body.append(s); }"
    )
    assert page.evaluate("() => window.hit") is None
    context.close()
