// What every client is asked for, as scenario.py has it.
import { readFileSync } from "node:fs";
import { z } from "zod";

export const { PROMPT, MAX_TOKENS } = JSON.parse(process.env.SCENARIO);
export const LONGEST = 120;
export const RESULT = "rain at 14 degrees";
export const Event = z.strictObject({ name: z.string().min(1).max(8), day: z.number().int().min(1).max(31) });
export const Place = z.strictObject({ city: z.string().min(1).max(8) });

const versionOf = (name) => JSON.parse(readFileSync(new URL(`node_modules/${name}/package.json`, import.meta.url))).version;

export function report(packages, found) {
  const versions = Object.fromEntries(packages.map((name) => [name, versionOf(name)]));
  console.log(JSON.stringify({ versions, ...found }));
}
