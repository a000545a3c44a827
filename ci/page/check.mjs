// Looks at pages of fleets in Chromium: node check.mjs FOLDER, with .html files. Writes pictures beside them.
// Fails if axe-core finds something, a page is wider than the screen, the last row of a table is cut, or a page
// asks for anything or runs a script.
import { readdirSync, readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { resolve } from "node:path";
import { chromium } from "playwright-core";

const axe = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const folder = resolve(process.argv[2]);
const browser = await chromium.launch({
  executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium",
  args: process.getuid() === 0 ? ["--no-sandbox"] : [],
});
let problems = 0;
const problem = (...words) => { problems += 1; console.log(...words); };

for (const file of readdirSync(folder).filter((name) => name.endsWith(".html")).sort()) {
  const name = file.replace(".html", "");
  const address = `file://${folder}/${file}`;
  for (const [device, width, height] of [["desk", 1440, 900], ["laptop", 1280, 720], ["phone", 360, 740]]) {
    for (const colorScheme of ["light", "dark"]) {
      // The policy of the page forbids scripts, also that of axe-core.
      const context = await browser.newContext({ viewport: { width, height }, colorScheme, bypassCSP: true });
      const page = await context.newPage();
      page.on("request", (one) => one.url() === address || problem(file, "asks for", one.url()));
      page.on("dialog", (one) => { problem(file, "opens a dialog"); return one.dismiss(); });
      await page.goto(address);
      const wide = await page.evaluate(() => document.documentElement.scrollWidth);
      if (wide > width) problem(file, device, "is", wide, "pixels wide");
      const cut = await page.evaluate(() => [...document.querySelectorAll(".scroll:not(.tall)")]
        .filter((one) => one.scrollHeight > one.clientHeight).length);
      if (cut) problem(file, device, "has", cut, "tables of which the last rows are cut");
      const picture = { path: `${folder}/${name}-${device}-${colorScheme}.png` };
      const tall = await page.evaluate(() => document.documentElement.scrollHeight);
      await page.screenshot({ ...picture, fullPage: tall < 16000 });
      const elements = await page.evaluate(() => document.querySelectorAll("*").length);
      // axe-core takes minutes for a large page, which has the same parts as a small one.
      if (elements > 10000) { await context.close(); continue; }
      await page.evaluate(() => document.querySelectorAll("details").forEach((one) => { one.open = true; }));
      await page.evaluate(axe);
      const { violations } = await page.evaluate(() => axe.run(document, { resultTypes: ["violations"] }));
      for (const { id, help, nodes } of violations) {
        problem(file, device, colorScheme, id, help, nodes.length, nodes[0].html.slice(0, 200));
      }
      await context.close();
    }
  }
  const page = await browser.newPage();
  await page.goto(address);
  await page.pdf({ path: `${folder}/${name}.pdf`, preferCSSPageSize: true });
  await page.keyboard.press("Tab");
  await page.keyboard.press("Enter");
  const skipped = await page.evaluate(() => document.activeElement.id);
  if (skipped !== "content") problem(file, "the first link leads to", skipped);
  const isOpen = () => page.evaluate(() => document.querySelector("details").open);
  const before = await isOpen();
  await page.evaluate(() => document.querySelector("summary").focus());
  await page.keyboard.press("Enter");
  if ((await isOpen()) === before) problem(file, "a summary does not open or close");
  await page.close();
}
await browser.close();
console.log(problems ? `${problems} problems` : "no problems", "in", folder);
process.exit(problems ? 1 : 0);
