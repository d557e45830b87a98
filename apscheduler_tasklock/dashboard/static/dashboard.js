// Refreshes what has changed on a page, and copies texts. Pages work without it.
"use strict";

(() => {
  const INTERVAL = 5000;
  let late = null;

  // Whether the reader is in the middle of something in this part of the page.
  const isInUse = (part) =>
    part.contains(document.activeElement) ||
    part.querySelector("details[open], input:checked") !== null ||
    (!document.getSelection().isCollapsed && part.contains(document.getSelection().anchorNode));

  const clock = () => new Date().toLocaleTimeString([], { hour12: false });

  // The line below a part of the page that says since when the part has not been refreshed.
  const stillOf = (part) => {
    const line = part.nextElementSibling;
    return line && line.matches(".still") ? line : null;
  };

  const tellStill = (part) => {
    if (stillOf(part) || !part.matches("div, section")) return;
    const line = document.createElement("p");
    line.className = "notice still";
    line.setAttribute("role", "status");
    line.textContent =
      `Not refreshed since ${clock()}, because you have opened, selected or focused something above.`;
    part.after(line);
  };

  const replaceChanged = (fresh) => {
    for (const part of document.querySelectorAll("[data-live]")) {
      const next = fresh.getElementById(part.id);
      const isChanged = next && next.innerHTML !== part.innerHTML;
      if (isChanged && isInUse(part)) {
        tellStill(part);
        continue;
      }
      stillOf(part)?.remove();
      if (isChanged) part.replaceChildren(...next.childNodes);
    }
  };

  // Says that the page is not current, with the time since when.
  const tellLate = (inWords) => {
    late = late || clock();
    const text = inWords(late);
    const notices = document.getElementById("notices");
    if (notices.textContent.trim() === text) return; // so that a screen reader says it once
    const line = document.createElement("p");
    line.className = "notice bad";
    line.setAttribute("role", "alert");
    line.textContent = text;
    notices.replaceChildren(line);
  };

  const refresh = async () => {
    if (document.hidden) return;
    try {
      const answer = await fetch(location.href, { signal: AbortSignal.timeout(20000) });
      const isPage = (answer.headers.get("content-type") || "").startsWith("text/html");
      const text = isPage ? await answer.text() : "";
      const fresh = new DOMParser().parseFromString(text, "text/html");
      const error = fresh.getElementById("error");
      if (error) {
        tellLate((time) => `Since ${time} this page cannot be read anew: ${error.textContent}`);
        return;
      }
      if (!isPage || ![200, 503].includes(answer.status) || answer.redirected) {
        throw new Error(`status ${answer.status}`);
      }
      replaceChanged(fresh);
      late = null;
    } catch {
      tellLate((time) => `The dashboard has not answered since ${time}. This page is tried again.`);
    }
  };

  const again = async () => {
    await refresh();
    setTimeout(again, INTERVAL);
  };

  // In a lane, the tabulator stops at one shape. The arrow keys lead to those beside it.
  document.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const lane = step && document.activeElement.closest?.(".lane svg");
    if (!lane) return;
    const left = (link) => link.getBoundingClientRect().left;
    const links = [...lane.querySelectorAll("a")].sort((one, other) => left(one) - left(other));
    links[links.indexOf(document.activeElement) + step]?.focus();
    event.preventDefault();
  });

  for (const button of document.querySelectorAll("[data-copy]")) {
    if (!navigator.clipboard) continue;
    button.hidden = false;
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(document.getElementById(button.dataset.copy).textContent);
      button.textContent = "Copied";
    });
  }

  // A message about what was done stays out of the address, so that a reload does not repeat it.
  const address = new URL(location.href);
  if (address.searchParams.has("done")) {
    address.searchParams.delete("done");
    address.searchParams.delete("counts");
    history.replaceState(null, "", address);
  }
  if (document.querySelector("[data-refresh]")) setTimeout(again, INTERVAL);
})();
