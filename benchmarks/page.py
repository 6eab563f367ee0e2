"""Draws ``docs/live-page.png``: the live page while a server decodes, in headless Chromium.

python -m benchmarks.page --output docs/live-page.png
"""

from __future__ import annotations

import argparse
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

from benchmarks._common import ROOT, prepare
from benchmarks.prompts import OWN, load_prompts
from benchmarks.serving import Server

WARM = 20.0
"""Seconds of load before the picture."""


def main() -> None:
    """Start a server, load it, and take the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "live-page.png")
    parser.add_argument("--clients", type=int, default=8)
    arguments = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("no Chromium here: install the package chromium")
    prepare()
    with Server(arguments.target, ["--max-slots", "12", "--set", "max_len=1024"]) as server:
        stop = threading.Event()
        threads = [threading.Thread(target=load, args=(server, i, stop)) for i in range(arguments.clients)]
        for thread in threads:
            thread.start()
        try:
            picture(server.url, chromium, arguments.output)
        finally:
            stop.set()
            for thread in threads:
                thread.join()


def load(server: Server, index: int, stop: threading.Event) -> None:
    """One client after another prompt, greedy and sampled in turn."""
    prompts = [p.text for p in load_prompts(4, OWN)]
    prompts += [f"Write this three times, word for word: {p[:120]}" for p in prompts]
    turn = index
    while not stop.is_set():
        sampling: dict[str, Any] = [{"temperature": 0}, {"seed": turn}, {"temperature": 0.7}][turn % 3]
        text = prompts[(turn * 5) % len(prompts)]
        server.post(
            "/v1/chat/completions",
            {"model": server.model, "messages": [{"role": "user", "content": text}], "max_tokens": 160, **sampling},
        )
        turn += 1


def picture(url: str, chromium: str, output: Path) -> None:
    """Wait for requests with curves, and write the page as it is."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.goto(url)
        page.wait_for_selector("#connection[data-state=live]")
        page.wait_for_timeout(1000 * WARM)
        page.wait_for_selector("#requests td svg rect.bar", state="attached", timeout=120_000)
        page.screenshot(path=output, full_page=True)
        browser.close()


if __name__ == "__main__":
    main()
