"""The style sheet of a report: light and dark, wide and narrow, and print."""

from __future__ import annotations

from typing import Final

LIGHT: Final = {
    "--paper": "#ffffff",
    "--ink": "#1a1a1a",
    "--muted": "#555555",
    "--line": "#c8c8c8",
    "--soft": "#f2f4f7",
    "--s0": "#005a9c",
    "--s1": "#b34700",
    "--s2": "#00704d",
    "--s3": "#9b3b77",
    "--s4": "#6b5b00",
    "--s5": "#404040",
    "--s6": "#6a35b8",
}
DARK: Final = {
    "--paper": "#14171c",
    "--ink": "#ececec",
    "--muted": "#b4b9c2",
    "--line": "#4a505a",
    "--soft": "#20252d",
    "--s0": "#7cc4ff",
    "--s1": "#ffa061",
    "--s2": "#4fd6a6",
    "--s3": "#f29ccc",
    "--s4": "#e6d36b",
    "--s5": "#d0d0d0",
    "--s6": "#c5a3ff",
}


def _set(colours: dict[str, str]) -> str:
    return "".join(f"{name}:{value};" for name, value in colours.items())


STYLE: Final = f"""
:root{{color-scheme:light dark;{_set(LIGHT)}}}
@media (prefers-color-scheme:dark){{:root{{{_set(DARK)}}}}}
@media print{{:root{{color-scheme:light;{_set(LIGHT)}}}}}
*{{box-sizing:border-box}}
body{{margin:0 auto;max-width:1180px;padding:16px;background:var(--paper);color:var(--ink);
font:15px/1.5 system-ui,sans-serif}}
bdi,code,pre,.sample p{{overflow-wrap:anywhere}}
h1{{font-size:24px;margin:8px 0}}
h2{{font-size:19px;margin:32px 0 8px;border-top:1px solid var(--line);padding-top:16px}}
h3{{font-size:15px;margin:16px 0 4px}}
p{{max-width:75ch;margin:8px 0}}
.note,figcaption,summary{{color:var(--muted);font-size:13px}}
.summary li{{margin:6px 0;max-width:75ch}} .summary{{padding-left:20px;font-size:16px}}
.plots{{display:flex;flex-wrap:wrap;gap:16px}}
figure{{margin:8px 0;flex:0 1 340px;max-width:340px}} figure svg{{display:block;max-width:100%}}
table{{border-collapse:collapse;width:100%;font-size:13px;margin:8px 0}}
th,td{{text-align:left;vertical-align:top;padding:4px 8px;border-bottom:1px solid var(--line)}}
th{{color:var(--muted);font-weight:600}}
th.n,td.n{{text-align:right;font-variant-numeric:tabular-nums}}
.bar{{display:inline-block;width:90px;height:10px;background:var(--soft);border:1px solid var(--line);
vertical-align:middle;print-color-adjust:exact;-webkit-print-color-adjust:exact}}
td:has(>.bar){{white-space:nowrap}} td:has(>bdi){{min-width:9em}}
.bar>span{{display:block;height:100%}}
pre{{background:var(--soft);padding:12px;white-space:pre-wrap;font:13px/1.5 ui-monospace,monospace}}
.samples{{display:grid;grid-template-columns:repeat(auto-fill,minmax(300px,1fr));gap:16px}}
.sample{{border:1px solid var(--line);padding:12px;min-width:0}} .sample p{{white-space:pre-wrap;font-size:13px}}
.trained{{background:var(--soft);border-bottom:2px solid var(--s0)}}
.picture img{{max-width:100%;height:auto}}
@media (max-width:1000px){{.bar{{width:48px}}}}
@media (max-width:640px){{
thead{{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)}}
tr{{display:block;border-bottom:1px solid var(--line);padding:6px 0}}
td,td.n{{display:flex;align-items:center;justify-content:space-between;gap:12px;border:0;padding:2px 0;
text-align:right}}
td::before{{content:attr(data-of);color:var(--muted);text-align:left;flex:0 0 40%}}
.samples{{grid-template-columns:minmax(0,1fr)}}
}}
@media print{{
body{{padding:0;max-width:none}}
h1,h2,h3,h2+p,thead{{break-after:avoid}} h2{{margin-top:20px;padding-top:10px}}
figure>svg,tr,h2+p,.sample,.summary li{{break-inside:avoid}}
.plots{{display:block;orphans:1;widows:1}} figure{{display:inline-block;width:340px;vertical-align:top}}
figure:only-child{{display:block}}
th,td{{padding:2px 6px}}
.plots table{{font-size:11px;line-height:1.2;margin:4px 0}} .plots th,.plots td{{padding:0 6px}}
details::details-content{{content-visibility:visible;block-size:auto}}
.samples{{grid-template-columns:repeat(3,minmax(0,1fr));gap:8px}} .sample{{padding:8px}}
.picture img{{max-height:200px}}
}}
"""
