"""The dashboard in a real browser, on a real mesh with a job that trains and is hit."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from schemas.job import JobState
from tests.integration.dashboard.conftest import PATIENCE_MS, VIEWER, Open, Site
from tests.integration.dashboard.severable_proxy import SeverableProxy
from tests.integration.mesh.conftest import tiny_job

if TYPE_CHECKING:
    from playwright.sync_api import Page

VIEWS = ("mesh", "jobs", "compare", "services", "registry", "costs", "policies", "nodes", "logs", "tap")
LOSS = ".figures div:nth-child(1) dd"


def changes(page: Page, selector: str) -> None:
    """Waits until what stands there is another than now."""
    before = page.inner_text(selector)
    page.wait_for_function(
        "([selector, before]) => document.querySelector(selector).innerText !== before",
        arg=[selector, before],
        timeout=PATIENCE_MS,
    )


def test_it_shows_the_instances_and_the_loss_moves(open_page: Open, site: Site) -> None:
    page = open_page(moving=True)
    assert site.token not in page.url
    page.wait_for_function("() => document.querySelectorAll('.share-row').length >= 5")
    assert re.fullmatch(r"\d\.\d{4}", page.inner_text(LOSS).strip())
    changes(page, LOSS)
    page.wait_for_function(
        "() => document.querySelector('.stagebox').ariaLabel?.includes('instances in 3 stages')"
    )
    page.wait_for_selector(".chart canvas")
    page.reload()  # the token stays with the tab
    page.wait_for_selector("#link-state .s-live")


def test_a_killed_instance_appears_on_the_time_line_and_recovers(open_page: Open, site: Site) -> None:
    page = open_page()
    page.wait_for_selector(".share-row")
    victim = next(one for one in site.client.mesh().services if one.sid == f"{site.job}-s1-r1")
    os.kill(victim.endpoint.pid, signal.SIGKILL)
    page.wait_for_selector(f".happened li:has(.k-fault):has-text('{victim.sid}')")
    page.wait_for_selector(".lane .k-fault")
    page.wait_for_selector(".happened li:has(.k-recovery)")
    line = page.locator(".share-row", has_text="s1 · r1").locator(".state")
    line.and_(page.locator(".s-active")).wait_for()
    changes(page, LOSS)


def test_the_configuration_of_a_job_is_shown(open_page: Open) -> None:
    page = open_page()
    page.wait_for_selector(".share-row")
    page.click("nav a[href='#/jobs']")
    page.click("button:has-text('Configuration')")
    page.wait_for_selector("dialog[open] pre")
    shown = page.inner_text("dialog[open] pre")
    assert "name: seen" in shown
    assert "pad_ms: 60" in shown
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog[open]", state="hidden")


def test_logs_are_searched(open_page: Open) -> None:
    page = open_page("logs")
    page.wait_for_selector(".lines li")
    page.fill("input[name=text]", "gateway ready")
    page.press("input[name=text]", "Enter")
    page.wait_for_function(
        """() => [...document.querySelectorAll('.lines .text')]
            .every((line) => line.innerText.includes('gateway ready'))"""
    )
    assert page.locator(".lines li").count() >= 1


def test_by_keyboard_alone(open_page: Open) -> None:
    page = open_page()
    page.reload()  # the focus is where a page begins
    page.wait_for_selector(".share-row")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "stagebox"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("ArrowRight")
    page.wait_for_selector(".share-row[aria-pressed=true]")
    first = page.inner_text("#said")
    page.keyboard.press("ArrowRight")
    page.wait_for_function("(first) => document.getElementById('said').innerText !== first", arg=first)
    page.wait_for_selector("dl.pairs")
    page.keyboard.press("Escape")
    page.wait_for_selector("dl.pairs", state="hidden")


def test_on_a_phone_nothing_is_wider_than_the_screen(open_page: Open) -> None:
    page = open_page(width=360)
    for view in VIEWS:
        page.click(f"nav a[href='#/{view}']")
        page.wait_for_selector(f"nav a[href='#/{view}'][aria-current=page]")
        page.wait_for_selector("main .panel")
        assert page.evaluate("document.documentElement.scrollWidth") <= 360, view


def test_jobs_are_compared_and_a_running_one_goes_on(open_page: Open, site: Site) -> None:
    other = site.client.submit(tiny_job("other", training={"steps": 6, "validate_every": 2}))
    assert site.client.wait(other.job).state is JobState.DONE
    page = open_page("compare", token=VIEWER)
    for job in (site.job, other.job):
        page.locator(".choices label", has_text=job).locator("input").check()
    line = page.locator("tr", has_text=site.job).filter(has_text="/100000")
    line.wait_for()
    page.wait_for_selector(".chart canvas")
    keys = page.locator("section:has(#differences-title) tbody tr")
    keys.filter(has_text="training.steps").wait_for()
    assert keys.filter(has_text="data.source").count() == 0, "only what differs"
    page.locator("tr", has_text=other.job).filter(has_text="★").wait_for()
    step = line.locator("td").nth(2).inner_text()
    page.wait_for_function(
        "([job, step]) => ![...document.querySelectorAll('tr')].some((row) => row.innerText.includes(job)"
        " && row.children[2].innerText === step)",
        arg=[site.job, step],
    )


def test_dark_and_light(open_page: Open) -> None:
    def ground() -> str:
        found = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
        assert isinstance(found, str)
        return found

    page = open_page(dark=True)
    dark = ground()
    page.emulate_media(color_scheme="light")
    page.wait_for_selector("html[data-theme=light]")
    light = ground()
    assert sum(map(int, re.findall(r"\d+", light))) > 600 > sum(map(int, re.findall(r"\d+", dark)))
    page.click("#theme")
    assert ground() == dark
    page.reload()
    page.wait_for_selector("#link-state .s-live")
    assert ground() == dark


def test_the_tap_filters_and_pauses(open_page: Open) -> None:
    page = open_page("tap", token=VIEWER)
    page.fill("input[name=subject]", "job.event.>")
    page.fill("input[name=where]", "kind=step")
    page.press("input[name=where]", "Enter")
    page.wait_for_function("() => document.querySelectorAll('.tapped li').length >= 3")
    assert "door" in page.inner_text(".panel header .end")  # what a viewer's tap leaves out
    assert all("kind=step" in line for line in page.locator(".tapped .sum").all_inner_texts())
    page.click("text=Pause")
    count = page.locator(".tapped li").count()
    page.wait_for_selector("text=/paused, [1-9]\\d* wait/")
    assert page.locator(".tapped li").count() == count
    page.locator(".tapped summary").first.click()
    assert '"kind": "step"' in page.inner_text(".tapped pre")
    page.fill("input[name=subject]", "door.>")
    page.press("input[name=subject]", "Enter")
    page.wait_for_selector("text=may not tap")


def test_a_viewer_may_not_cancel(open_page: Open, site: Site) -> None:
    page = open_page("jobs", token=VIEWER)
    button = page.get_by_role("button", name=f"Cancel {site.job}: a viewer may not")
    assert button.is_disabled()
    status = page.evaluate(
        """(job) => fetch(`/v1/jobs/${job}/cancel`, {
            method: "POST", headers: {Authorization: `Bearer ${sessionStorage.getItem("dmsc-token")}`}
        }).then((answer) => answer.status)""",
        site.job,
    )
    assert status == 403


def test_it_comes_back_by_itself(open_page: Open, site: Site) -> None:
    with SeverableProxy(site.url) as proxy:
        page = open_page(door=proxy.url)
        page.wait_for_selector(".share-row")
        page.evaluate("window.stay = true")
        proxy.cut()
        page.wait_for_selector("#link-state .s-lost, #link-state .s-connecting")
        page.wait_for_selector("#banner:has-text('Trying again')")
        proxy.mend()
        page.wait_for_selector("#link-state .s-live")
        changes(page, LOSS)
        assert page.evaluate("window.stay")  # it is the same page


@pytest.mark.skipif("DMSC_AXE" not in os.environ, reason="DMSC_AXE names no axe.min.js (npm pack axe-core)")
def test_axe_finds_nothing(open_page: Open) -> None:
    page = open_page()
    page.wait_for_selector(".share-row")
    script = Path(os.environ["DMSC_AXE"]).read_text()
    for dark in (False, True):
        page.emulate_media(color_scheme="dark" if dark else "light")
        for view in VIEWS:
            page.click(f"nav a[href='#/{view}']")
            page.wait_for_selector("main .panel")
            page.evaluate(script)
            found = page.evaluate(
                """axe.run().then((it) => it.violations.map(
                    (one) => `${one.id}: ${one.nodes.map((node) => node.html).slice(0, 3)}`))"""
            )
            assert found == [], (view, dark, found)


def test_who_waits_and_what_is_kept_is_shown(open_page: Open, site: Site) -> None:
    waiting = site.client.submit(tiny_job("waits", parallel={"stages": 2, "replicas": 2})).job
    site.mesh.printed("reserve", "1", "--from", "20h", "--until", "1h", "--user", "rita", "--name", "night")
    try:
        page = open_page("jobs")
        queue = page.get_by_role("group", name="Queue")
        queue.get_by_text(waiting).wait_for()
        assert "slots" in queue.inner_text()
        kept = page.get_by_role("group", name="Reservations").inner_text()
        assert "night" in kept
        assert "rita" in kept
    finally:
        site.mesh.printed("queue", "release", "night")
        site.client.cancel(waiting)


def test_a_job_is_parked_and_resumed(open_page: Open, site: Site) -> None:
    page = open_page("jobs")
    page.get_by_role("button", name=f"Park {site.job}").click()
    page.wait_for_selector("tr .s-parked")
    page.get_by_role("button", name=f"Resume {site.job}").click()
    page.wait_for_selector("tr .s-running")
    assert site.client.job(site.job).held == ""


def test_cancelling_asks_first(open_page: Open, site: Site) -> None:
    """The last of this file: the job is over afterwards."""
    page = open_page("jobs")
    page.get_by_role("button", name=f"Cancel {site.job}").click()
    page.wait_for_selector("dialog[open]")
    page.keyboard.press("Escape")
    assert site.client.job(site.job).state is JobState.RUNNING
    page.get_by_role("button", name=f"Cancel {site.job}").click()
    page.click("#confirm-cancel")
    page.wait_for_selector("tr .s-cancelled")
    assert site.client.job(site.job).state is JobState.CANCELLED
