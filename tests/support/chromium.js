// Drops files on pages in a real headless Chromium: node chromium.js BROWSER PROFILE_FOLDER, with jobs as JSON on standard input:
// [{page, files, withoutCrypto}]. Speaks the DevTools protocol; prints what each page then says, and the requests that it made.
"use strict";
const fs = require("node:fs"), { spawn } = require("node:child_process");

const [browser, profile] = process.argv.slice(2), jobs = JSON.parse(fs.readFileSync(0, "utf8"));
const chromium = spawn(browser, ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", `--user-data-dir=${profile}`, "about:blank"]);
let said = "", number = 0;
const waiting = new Map(), events = [];

const address = new Promise((found, failed) => {
  chromium.stderr.on("data", (text) => {
    const at = /DevTools listening on (ws:\S+)/.exec((said += text));
    if (at) found(at[1]);
  });
  chromium.on("error", failed);
  chromium.on("exit", () => failed(new Error(`the browser ended: ${said.slice(-1000)}`)));
});

(async () => {
  const socket = new WebSocket(await address);
  await new Promise((opened) => { socket.onopen = opened; });
  socket.onmessage = ({ data }) => {
    const { id, method, params, result, error } = JSON.parse(data);
    if (id === undefined) return events.push({ method, params });
    const { done, failed } = waiting.get(id);
    if (error) failed(new Error(error.message)); else done(result);
  };
  const ask = (method, params = {}, sessionId = undefined) => new Promise((done, failed) => {
    waiting.set(++number, { done, failed });
    socket.send(JSON.stringify({ id: number, method, params, sessionId }));
  });
  const shown = [];
  for (const { page, files, withoutCrypto } of jobs) {
    const { targetId } = await ask("Target.createTarget", { url: "about:blank" });
    const { sessionId } = await ask("Target.attachToTarget", { targetId, flatten: true });
    const here = (method, params) => ask(method, params, sessionId);
    const value = async (expression) => (await here("Runtime.evaluate", { expression, returnByValue: true })).result.value;
    const until = async (expression) => { while (!(await value(expression))) await new Promise((go) => setTimeout(go, 50)); };
    events.length = 0;
    await here("Page.enable");
    await here("Network.enable");
    if (withoutCrypto) await here("Page.addScriptToEvaluateOnNewDocument", { source: 'Object.defineProperty(globalThis, "crypto", { value: {} })' });
    await here("Page.navigate", { url: `file://${page}` });
    await until(`document.readyState === "complete" && location.protocol === "file:"`);
    const [x, y] = await value('(() => { const drop = document.getElementById("drop"); drop.scrollIntoView(); const box = drop.getBoundingClientRect(); return [box.x + 20, box.y + 20]; })()');
    for (const type of ["dragEnter", "dragOver", "drop"]) await here("Input.dispatchDragEvent", { type, x, y, data: { items: [], files, dragOperationsMask: 1 } });
    await until('!/^(Nothing was|reading|computing)/.test(document.getElementById("verdict").textContent)');
    const found = await value('({ state: document.getElementById("verdict").className, verdict: document.getElementById("verdict").textContent, findings: [...document.querySelectorAll("#findings li")].map((each) => each.textContent), drawn: document.querySelector("#curve svg") !== null })');
    shown.push({ ...found, requests: events.filter((each) => each.method === "Network.requestWillBeSent").map((each) => each.params.request.url) });
    await ask("Target.closeTarget", { targetId });
  }
  console.log(JSON.stringify(shown));
  await ask("Browser.close").catch(() => undefined);
  process.exit(0);
})().catch((error) => { console.error(error); chromium.kill(); process.exit(1); });
