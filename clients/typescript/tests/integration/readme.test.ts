// The package installs into an empty project, and the programs of its README run as printed.

import assert from "node:assert/strict";
import { execFileSync, spawnSync } from "node:child_process";
import { readFileSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { join, resolve } from "node:path";
import { after, before, suite, test } from "node:test";
import { Demo, Process, skip } from "./processes.js";

const programs = [...readFileSync("README.md", "utf8").matchAll(/```js\n([\s\S]*?)```/g)].map(
  (match) => match[1] ?? "",
);
/** What each program prints. */
const printed = [[/ADDED \S+\/\S+ \w+\n/], [/new: \S+\/\S+\n/, /node-\d+ \d+\n/]];
/** A project in which only the packed package was installed; `check` makes it. */
const project = process.env["KUBEFAN_TYPESCRIPT_PROJECT"] ?? "";
const skipProject = project === "" ? "clients/typescript/check makes the project" : false;

test("the first program is short", () => {
  assert.equal(programs.length, printed.length);
  assert(programs[0] !== undefined && programs[0].split("\n").length <= 20);
});

suite("the programs of the README", { skip: skip === false ? skipProject : skip }, () => {
  let demo: Demo;
  before(async () => {
    demo = await Demo.start();
  });
  after(async () => {
    await demo[Symbol.asyncDispose]();
  });

  for (const [number, patterns] of printed.entries()) {
    test(`number ${String(number + 1)} runs as printed`, async () => {
      const file = join(project, `program-${String(number)}.mjs`);
      writeFileSync(file, programs[number] ?? "");
      await using running = new Process(process.execPath, [file, demo.address]);
      for (const pattern of patterns) {
        await running.untilWritten(pattern);
      }
    });
  }
});

suite("the installed package", { skip: skipProject }, () => {
  test("loads as an ES module and as CommonJS", () => {
    const show = "console.log(typeof Client.connect, new Expired('x').name)";
    for (const [name, line] of [
      ["load.mjs", `import { Client, Expired } from "kubefan"; ${show}`],
      ["load.cjs", `const { Client, Expired } = require("kubefan"); ${show}`],
    ] as const) {
      writeFileSync(join(project, name), line);
      const output = execFileSync(process.execPath, [name], { cwd: project, encoding: "utf8" });
      assert.equal(output, "function Expired\n");
    }
  });

  test("has its types in both forms", () => {
    const tsc = createRequire(import.meta.url).resolve("typescript/bin/tsc");
    const lines = [
      'import { Client } from "kubefan";',
      'const client = new Client("h:1");',
      "async function main(): Promise<void> {",
      '  for await (const event of client.watch("pods", { namespace: "n" })) {',
      "    const key: string = event.object.key;",
      "    console.log(key);",
      "  }",
      '  client.watch("pods", { noSuchOption: 1 });',
      "}",
      "void main();",
    ];
    const files = ["program.mts", "program.cts"].map((name) => join(project, name));
    for (const file of files) {
      writeFileSync(file, lines.join("\n"));
    }
    const flags = ["--strict", "--noEmit", "--module", "node16", "--target", "es2022"];
    const types = ["--types", "node", "--typeRoots", resolve("node_modules/@types")];
    const checked = spawnSync(process.execPath, [tsc, ...flags, ...types, ...files], {
      encoding: "utf8",
    });
    const errors = checked.stdout.split("\n").filter((line) => line.includes("error TS"));
    assert.equal(errors.length, files.length, checked.stdout);
    assert(errors.every((error) => error.includes("noSuchOption")));
  });
});
