"""The frame and the style sheet of pages, light and dark by the reader's own setting."""

from html import escape

STYLE = """
:root { --ink: #1f2328; --soft: #656d76; --paper: #ffffff; --card: #f6f8fa; --rule: #d8dee4;
  --a: #3b6fb6; --b: #c2571a; --c: #6f4bb2; --good: #2f8f5b; --warn: #b7791f; --bad: #c0334d;
  --productive: #3b6fb6; --compile: #8a63c4; --data: #d08b2c; --evaluation: #3f9c8f; --checkpoint: #7fa650;
  --repeated: #c0334d; --down: #7a2438; --other: #a9b1ba; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9198a1; --paper: #0d1117; --card: #161b22;
  --rule: #30363d; --a: #6ea8fe; --b: #f0883e; --c: #b392f0; --good: #56d38a; --warn: #e3b341; --bad: #ff7b8f;
  --productive: #5b95ea; --compile: #a585e0; --data: #e0a04a; --evaluation: #56b8aa; --checkpoint: #9cc46c;
  --repeated: #f0617a; --down: #a8445c; --other: #59616b; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 860px; margin: 0 auto; padding: 32px 20px 64px; }
h1 { font-size: 26px; line-height: 1.2; margin: 0; overflow-wrap: anywhere; }
header p { color: var(--soft); margin: 4px 0 0; }
h2 { font-size: 16px; font-weight: 600; margin: 36px 0 10px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(140px, 1fr)); gap: 8px; margin: 24px 0 0; }
.tiles div { background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: 10px 14px; }
.tiles dt { color: var(--soft); font-size: 13px; }
.tiles dd { margin: 0; font-size: 20px; font-weight: 600; font-variant-numeric: tabular-nums; }
svg { display: block; width: 100%; height: auto; font-size: 12px; font-variant-numeric: tabular-nums; }
svg text { fill: var(--soft); }
svg.bar { height: 26px; border-radius: 6px; margin-bottom: 12px; }
.grid { stroke: var(--rule); stroke-width: 1; }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; }
.line.a { stroke: var(--a); } .line.b { stroke: var(--b); } .line.c { stroke: var(--c); }
.line.faint { stroke: var(--a); stroke-width: 1; opacity: .3; }
.dots circle { fill: var(--b); stroke: var(--paper); stroke-width: 1; }
.mark { stroke-width: 1.5; stroke-dasharray: 4 3; } .touch { stroke: transparent; stroke-width: 10; }
.mark.good { stroke: var(--good); } .mark.warn { stroke: var(--warn); } .mark.bad { stroke: var(--bad); }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; color: var(--soft); font-size: 13px; margin: 2px 0 0 58px; }
.key { display: inline-block; width: 10px; height: 10px; border-radius: 3px; margin-right: 7px; }
.key.a { background: var(--a); } .key.b { background: var(--b); } .key.c { background: var(--c); }
.key.dots { background: var(--b); border-radius: 50%; }
.key.line { height: 0; width: 14px; border-radius: 0; border-top: 2px dashed; vertical-align: middle; }
.key.good { border-color: var(--good); } .key.warn { border-color: var(--warn); }
.key.bad { border-color: var(--bad); }
.productive { fill: var(--productive); background: var(--productive); }
.compile { fill: var(--compile); background: var(--compile); }
.data { fill: var(--data); background: var(--data); }
.evaluation { fill: var(--evaluation); background: var(--evaluation); }
.checkpoint { fill: var(--checkpoint); background: var(--checkpoint); }
.repeated { fill: var(--repeated); background: var(--repeated); }
.down { fill: var(--down); background: var(--down); }
.other { fill: var(--other); background: var(--other); }
table { width: 100%; border-collapse: collapse; font-size: 13.5px; }
td, th { text-align: left; padding: 5px 14px 5px 0; border-bottom: 1px solid var(--rule); vertical-align: top;
  overflow-wrap: anywhere; }
th { color: var(--soft); font-weight: 500; }
.events td:nth-child(-n+3), .events th { white-space: nowrap; overflow-wrap: normal; }
.number { font-variant-numeric: tabular-nums; white-space: nowrap; }
td:last-child { color: var(--soft); }
td:has(> .key) { white-space: nowrap; width: 1%; }
.facts td:first-child { white-space: nowrap; width: 1%; }
.facts td:last-child { color: var(--ink); }
b { font-weight: 600; } b.good { color: var(--good); } b.warn { color: var(--warn); } b.bad { color: var(--bad); }
pre { background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: 14px; overflow-x: auto;
  font: 12.5px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(320px, 1fr)); gap: 14px 20px; }
figure { margin: 0; } figcaption { font-size: 13.5px; margin-left: 58px; }
.answers td { white-space: pre-wrap; min-width: 76px; }
.answers td:first-child { min-width: 150px; } .answers b { display: block; font-weight: 500; }
.answers small { color: var(--soft); }
.none { color: var(--soft); }
.learned { background: color-mix(in srgb, var(--good) 24%, transparent); color: var(--ink); border-radius: 3px; }
pre.example { white-space: pre-wrap; overflow-wrap: anywhere; } .example small { color: var(--good); }
@media (max-width: 560px) { td:first-child.number { white-space: normal; } .legend { margin-left: 0; } }
"""


def html_page(title: str, body: str) -> str:
    """A page with this content, as HTML."""
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><title>{escape(title)}</title><style>{STYLE}</style>'
    )
    return f'<!doctype html><html lang="en"><head>{head}</head><body><main>{body}</main></body></html>\n'
