"""Chromium as the system has it: headless, and silent on the network."""

import shutil

from playwright.sync_api import Browser, Playwright

PATH = shutil.which("chromium") or shutil.which("chromium-browser")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def launch(playwright: Playwright) -> Browser:
    return playwright.chromium.launch(executable_path=PATH, args=ARGUMENTS)
