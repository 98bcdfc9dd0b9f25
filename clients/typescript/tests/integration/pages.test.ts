// The package installs into an empty project, and the programs of all pages run as printed.
//
// A page is a Markdown file for readers: README.md, docs/ and the READMEs of the clients. A block
// without a `client` of its own gets that of its page. A block after `<!-- excerpt: REASON -->` is
// left out.

import assert from "node:assert/strict";
import { execFileSync, spawnSync } from "node:child_process";
import { readdirSync, readFileSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { join, resolve } from "node:path";
import { after, before, suite, test } from "node:test";
import { Demo, Process, skip } from "./processes.js";

const repository = resolve("../..");
/** The address in the pages. */
const address = "127.0.0.1:7443";
/** The code that a block without a client continues. */
const beginning = `import { Client } from "kubefan";
const client = await Client.connect("${address}");
`;
/**
 * Output of each program. A program without output here needs a server with a certificate, and is
 * only compiled.
 */
const printed: Record<string, RegExp[][]> = {
  "clients/typescript/README.md": [
    [/ADDED \S+\/\S+ \w+\n/],
    [/new: \S+\/\S+\n/, /node-\d+ \d+\n/],
  ],
  "docs/clients-typescript.md": [
    [/ADDED \S+\/\S+\n/],
    [/ADDED team-0\/web-0-\S+ \w+\n/],
    [/ADDED \S+\/\S+\n/, /missed: [A-Z]+ \S+\/\S+\n/],
    [/ADDED \S+\/\S+\n/, /the state is complete: \d+\n/],
    [
      /\d+ pods at version \d+(\.end)?\n/,
      /team-0\/web-0-\S+ \w+\n/,
      /since then: [A-Z]+ \S+\/\S+\n/,
    ],
    [/new: \S+\/\S+ true\n/, /\d+ pods on node-1\n/, /changed: \S+\/\S+\n/],
    [/\S+\/\S+ \{"status":\{"phase":"\w+"\}\}\n/],
    [/start over: .+\n/, /ADDED \S+\/\S+\n/],
    [],
    [/NotFound OBJECT_NOT_FOUND false\n/],
    [],
  ],
};

/** The programs of a page, and their languages. */
function blocks(page: string): { language: string; program: string }[] {
  const block = /^(<!-- excerpt: .+ -->\n)?```(js|ts)\n([\s\S]*?)^```$/gm;
  const found = [...readFileSync(join(repository, page), "utf8").matchAll(block)];
  return found
    .filter(([, excerpt]) => excerpt === undefined)
    .map(([, , language = "", program = ""]) => ({
      language,
      program: /^import \{[^}]*\bClient\b/m.test(program) ? program : beginning + program,
    }));
}

/** The Markdown files below a directory of the repository. */
function markdown(directory: string): string[] {
  const files = readdirSync(join(repository, directory), { recursive: true, encoding: "utf8" });
  return files.filter((file) => file.endsWith(".md")).map((file) => `${directory}/${file}`);
}

const pages = [
  "README.md",
  ...markdown("docs"),
  ...readdirSync(join(repository, "clients")).map((client) => `clients/${client}/README.md`),
];
const programs = pages.flatMap((page) =>
  blocks(page).map((block, number) => ({ page, number, ...block })),
);

/** A project in which only the packed package was installed; `check` makes it. */
const project = process.env["KUBEFAN_TYPESCRIPT_PROJECT"] ?? "";
const skipProject = project === "" ? "clients/typescript/check makes the project" : false;

/**
 * Compiles files of the project with the types that are installed there and no others. It also
 * checks the types of the package. Returns what tsc printed.
 */
function tsc(options: object, files: string[]): string {
  const program = createRequire(import.meta.url).resolve("typescript/bin/tsc");
  const common = { strict: true, skipLibCheck: false, module: "node16", target: "es2022" };
  const settings = { compilerOptions: { ...common, ...options }, files };
  writeFileSync(join(project, "tsconfig.json"), JSON.stringify(settings));
  return spawnSync(process.execPath, [program], { cwd: project, encoding: "utf8" }).stdout;
}

test("every program of every page is tested", () => {
  const counts: Record<string, number> = {};
  for (const { page } of programs) {
    counts[page] = (counts[page] ?? 0) + 1;
  }
  const expected = Object.entries(printed).map(([page, all]) => [page, all.length]);
  assert.deepEqual(counts, Object.fromEntries(expected));
  for (const { page, number, program } of programs) {
    const isRun = (printed[page]?.[number]?.length ?? 0) > 0;
    assert(isRun || program.includes('"https://'), `${page}: ${program}`);
    assert(number > 0 || program.split("\n").length <= 20, "the first program is short");
  }
});

suite("the programs of the pages", { skip: skip === false ? skipProject : skip }, () => {
  let demo: Demo;
  const name = (at: number, language: string): string =>
    `program-${String(at)}.${language === "ts" ? "mts" : "mjs"}`;

  before(async () => {
    demo = await Demo.start();
    for (const [at, { language, program }] of programs.entries()) {
      writeFileSync(join(project, name(at, language)), program.replaceAll(address, demo.address));
    }
    const typed = [...programs.entries()].filter(([, { language }]) => language === "ts");
    const files = typed.map(([at, { language }]) => name(at, language));
    assert.equal(tsc({ noEmitOnError: true }, files), "");
  });
  after(async () => {
    await demo[Symbol.asyncDispose]();
  });

  for (const [at, { page, number }] of programs.entries()) {
    const patterns = printed[page]?.[number] ?? [];
    if (patterns.length === 0) {
      continue;
    }
    test(`${page}, number ${String(number + 1)}, runs as printed`, async () => {
      const file = join(project, name(at, "js"));
      // The README takes the address as an argument.
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
    const files = ["program.mts", "program.cts"];
    for (const file of files) {
      writeFileSync(join(project, file), lines.join("\n"));
    }
    // With the usual settings, and in a project that names its own types and libraries.
    for (const options of [{}, { types: [], lib: ["es2022"] }]) {
      const checked = tsc({ noEmit: true, ...options }, files);
      const errors = checked.split("\n").filter((line) => line.includes("error TS"));
      assert.equal(errors.length, files.length, checked);
      assert(
        errors.every((error) => error.includes("noSuchOption")),
        checked,
      );
    }
  });

  test("has the license", () => {
    const license = readFileSync(join(repository, "LICENSE"), "utf8");
    const installed = join(project, "node_modules/kubefan/LICENSE");
    assert.equal(readFileSync(installed, "utf8"), license);
  });
});
