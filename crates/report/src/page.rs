//! The page: its sections in order.

use crate::chart::{self, LANES};
use crate::markup::{Escaped, Table, bytes, count, date, grouped, percent, time};
use crate::model::{Block, Device, Event, Kind, Memory, Pool, State};
use crate::peak::{Equal, by_tag, equal, holders};
use crate::series::Series;
use crate::strips::{self, Sums};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt::Write;

const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");

/// Pools with sections of their own, the largest ones.
const POOLS: usize = 16;
/// Columns of the charts of all pools together, and of one.
const COLUMNS: (usize, usize) = (4096, 1000);
/// Segments of a pool that are drawn, and columns of all of a pool's strips, and of one.
const STRIPS: usize = 40;
const STRIP_COLUMNS: (usize, usize) = (12_000, 1000);
/// Rows of the tables.
const HOLDERS: usize = 25;
const TAGS: usize = 15;
const EVENTS: usize = 200;

/// Statistics: name, unit is bytes, meaning. In the page's order.
const STATS: [(&str, bool, &str); 28] = [
    ("live_bytes", true, "live, as asked for"),
    ("live_peak", true, "the most that was live"),
    ("live", false, "live buffers"),
    ("reserved", true, "taken from the driver"),
    ("reserved_peak", true, "the most that was taken"),
    ("limit", true, "the limit"),
    ("free_ready", true, "free for every stream"),
    ("free_not_ready", true, "free; a stream may still use them"),
    ("free_in_slabs", true, "free in slab runs"),
    ("free_in_thread_caches", true, "free in thread caches and the depot"),
    ("cached_pieces", true, "physical memory that is mapped nowhere"),
    ("in_graphs", true, "in arenas of graphs"),
    ("in_executables", true, "in executables of graphs, not counted above"),
    ("imported_bytes", true, "imported, not counted above"),
    ("imported", false, "imported buffers"),
    ("held_back", true, "kept from reuse by debug checks"),
    ("quarantined", true, "lost to driver calls that failed"),
    ("findings", false, "wrong uses that debug checks found"),
    ("allocations", false, "allocations"),
    ("thread_cache_hits", false, "of them served by a thread cache"),
    ("growths", false, "growths"),
    ("remaps", false, "moves of free granules"),
    ("host_waits", false, "waits of the host for a stream"),
    ("inserted_waits", false, "waits of a stream for another one's memory"),
    ("failed", false, "requests that failed"),
    ("retired", false, "dropped imports whose last use is pending"),
    ("driver_calls", false, "driver calls for memory"),
    ("metadata", true, "host memory of the tables"),
];

/// The page for text that is no snapshot.
pub(crate) fn refusal(why: &str) -> String {
    let note = format!(
        "<h1>Memory report</h1>\n<p class=\"note\">This is no snapshot of a memory, so nothing can be \
         shown: {}.</p>\n",
        Escaped(why)
    );
    document("Memory report", &note)
}

/// The page about a device.
pub(crate) fn page(device: &Device) -> String {
    let name = if device.name.is_empty() { "an unnamed device" } else { &device.name };
    let title = format!("Memory of {}", Escaped(name));
    let mut out = format!("<h1>{title}</h1>\n");
    let command = device.command.as_ref().map(|c| format!(" by <code>{}</code>", Escaped(c)));
    let at = device.made.map(|seconds| format!(" on {}", date(seconds)));
    if command.is_some() || at.is_some() {
        let (command, at) = (command.unwrap_or_default(), at.unwrap_or_default());
        let _ = writeln!(out, "<p class=\"soft\">Made{command}{at}.</p>");
    }
    let mut pools: Vec<&Pool> = device.pools.iter().collect();
    if pools.is_empty() {
        out.push_str(
            "<p class=\"note\">The snapshot is empty: it has no memory and no statistics.</p>\n",
        );
        return document(&title, &out);
    }
    pools.sort_by_key(|p| std::cmp::Reverse(p.memory.stat("reserved").unwrap_or(0)));
    if pools.len() > 1 {
        pool_table(&mut out, device, &pools);
    }
    let shown = pools.len().min(POOLS);
    for pool in &pools[..shown] {
        let section = Section { device, pool, columns: (COLUMNS.0 / shown).min(COLUMNS.1) };
        section.write(&mut out, pools.len() > 1);
    }
    if shown < pools.len() {
        let _ = writeln!(
            out,
            "<p class=\"soft\">{} smaller pools stand in the table of pools only.</p>",
            pools.len() - shown
        );
    }
    document(&title, &out)
}

fn document(title: &str, body: &str) -> String {
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"/>\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; \
         style-src 'unsafe-inline'; script-src 'unsafe-inline'\"/>\
         <title>{title}</title><style>\n{STYLE}</style></head><body>\n{body}\
         <script>\n{SCRIPT}</script></body></html>\n"
    )
}

fn pool_table(out: &mut String, device: &Device, pools: &[&Pool]) {
    let sum =
        |key: &str| pools.iter().filter_map(|p| p.memory.stat(key)).fold(0u64, u64::saturating_add);
    let mut tiles = Tiles::new(out);
    tiles.bytes("allocated", sum("live_bytes"), "");
    tiles.bytes("reserved", sum("reserved"), "all pools");
    match device.budget {
        Some(budget) => tiles.bytes("budget", budget, "for all pools together"),
        None => tiles.tile("budget", "none", ""),
    }
    tiles.end();
    let mut table =
        Table::new(&["~pool", "#live", "#reserved", "#most reserved", "#failed", "state"]);
    for pool in pools {
        let of = |key| pool.memory.stat(key).map_or_else(|| "–".to_owned(), bytes);
        table.row(&[
            Escaped(pool_name(pool)).to_string(),
            of("live_bytes"),
            of("reserved"),
            of("reserved_peak"),
            pool.memory.stat("failed").map_or_else(|| "–".to_owned(), grouped),
            if pool.suspended { "suspended" } else { "" }.to_owned(),
        ]);
    }
    out.push_str(&table.end());
}

fn pool_name(pool: &Pool) -> &str {
    if pool.name.is_empty() { "unnamed pool" } else { &pool.name }
}

/// Figures in boxes.
struct Tiles<'a> {
    out: &'a mut String,
}

impl<'a> Tiles<'a> {
    fn new(out: &'a mut String) -> Self {
        out.push_str("<dl class=\"tiles\">");
        Self { out }
    }

    fn tile(&mut self, title: &str, value: &str, note: &str) {
        let note = if note.is_empty() { String::new() } else { format!("<small>{note}</small>") };
        let _ = write!(self.out, "<div><dt>{title}</dt><dd>{value}{note}</dd></div>");
    }

    fn bytes(&mut self, title: &str, value: u64, note: &str) {
        self.tile(title, &bytes(value), note);
    }

    fn end(self) {
        self.out.push_str("</dl>\n");
    }
}

/// The sections about one pool.
struct Section<'a> {
    device: &'a Device,
    pool: &'a Pool,
    columns: usize,
}

impl Section<'_> {
    fn memory(&self) -> &Memory {
        &self.pool.memory
    }

    fn write(&self, out: &mut String, titled: bool) {
        let memory = self.memory();
        if titled {
            let _ = writeln!(out, "<h2>Pool: {}</h2>", Escaped(pool_name(self.pool)));
        }
        if self.pool.suspended {
            out.push_str(
                "<p class=\"note\">The pool is suspended: its addresses have no memory.</p>\n",
            );
        }
        if memory.is_empty() {
            out.push_str("<p class=\"note\">The snapshot says nothing of this memory.</p>\n");
            return;
        }
        let mut sums = Sums::default();
        memory.segments.iter().for_each(|s| sums.add(&Sums::of(s)));
        let series = Series::new(memory, self.columns);
        self.tiles(out, &sums, &series);
        self.over_time(out, &series);
        self.holders(out, &series);
        self.fragmentation(out, &sums);
        self.events(out);
        self.statistics(out);
    }

    fn tiles(&self, out: &mut String, sums: &Sums, series: &Series) {
        let memory = self.memory();
        let mut tiles = Tiles::new(out);
        if let Some(live) = memory.stat("live_bytes") {
            let what = if live == 0 { "empty buffer" } else { "buffer" };
            let held = memory.stat("live").filter(|&n| n > 0 || live > 0);
            tiles.bytes("live", live, &held.map_or_else(String::new, |n| count(n, what)));
        }
        if let Some(imported) = memory.stat("imported_bytes").filter(|&n| n > 0) {
            let held = count(memory.stat("imported").unwrap_or(0), "buffer");
            tiles.bytes("imported", imported, &format!("{held} of others' memory, not in live"));
        }
        if let Some(peak) = memory.stat("live_peak") {
            let at = if series.live_peak.value == peak && !memory.events.is_empty() {
                format!("at {}", time(series.live_peak.t_us))
            } else {
                "since the start or the last reset".to_owned()
            };
            tiles.bytes("peak of live", peak, &at);
        }
        if let Some(reserved) = memory.stat("reserved") {
            let most = memory.stat("reserved_peak").unwrap_or(reserved);
            tiles.bytes("reserved", reserved, &format!("at most {}", bytes(most)));
        }
        match self.budget() {
            Some(budget) => {
                let used = memory.stat("reserved").unwrap_or(0);
                tiles.bytes("budget", budget, &format!("{} of it reserved", percent(used, budget)));
            }
            None => tiles.tile("budget", "none", "as much as the device has"),
        }
        if sums.segments > 0 {
            tiles.tile(
                "external fragmentation",
                &sums.fragmentation(),
                "free bytes outside of the largest free range",
            );
            tiles.bytes(
                "largest free range",
                sums.largest,
                &format!("of {} free", bytes(sums.free())),
            );
        }
        if let Some(failed) = memory.stat("failed") {
            tiles.tile("failed requests", &grouped(failed), "");
        }
        tiles.end();
    }

    fn budget(&self) -> Option<u64> {
        let own = self.memory().stat("limit").filter(|&b| b != u64::MAX);
        own.or(self.device.budget)
    }

    fn over_time(&self, out: &mut String, series: &Series) {
        let memory = self.memory();
        out.push_str("<h3>Over time</h3>\n");
        if memory.events.is_empty() {
            out.push_str(
                "<p class=\"note\">No events were recorded, so nothing is known of the time before the \
                 snapshot. The option trace_events of the memory says how many are kept.</p>\n",
            );
            return;
        }
        if memory.events_lost > 0 {
            let _ = writeln!(
                out,
                "<p class=\"note\">The newest {} events were kept; {} older ones are lost. The curves begin \
                 with the oldest that is there.</p>",
                grouped(memory.events.len() as u64),
                grouped(memory.events_lost)
            );
        }
        out.push_str(&chart::figure(memory, series, self.columns, self.budget()));
    }

    fn name_of(&self, tag: u32) -> String {
        match (tag, self.memory().names.get(&tag)) {
            (_, Some(name)) => Escaped(name).to_string(),
            (0, None) => "<span class=\"soft\">unnamed</span>".to_owned(),
            (tag, None) => format!("tag {tag}"),
        }
    }

    fn stream_of(&self, stream: u16) -> String {
        if stream == 0 {
            return "–".to_owned();
        }
        if let Some(name) = self.memory().streams.get(&stream) {
            return Escaped(name).to_string();
        }
        match self.device.handles.get(&stream.to_string()) {
            Some(handle) => format!("{handle:#x}"),
            None => format!("stream {stream}"),
        }
    }

    fn holders(&self, out: &mut String, series: &Series) {
        let memory = self.memory();
        let holders = holders(memory, series);
        let recorded = !memory.events.is_empty();
        let known = holders.iter().fold(0u64, |sum, h| sum.saturating_add(h.bytes));
        let whole = if recorded {
            series.live_peak.value
        } else {
            memory.stat("live_bytes").unwrap_or(known)
        };
        if recorded {
            let _ = writeln!(
                out,
                "<h3>Largest holders at the peak</h3>\n<p class=\"soft\">{} ({} bytes) were live at {}, in {} \
                 known buffers of {}.</p>",
                bytes(whole),
                grouped(whole),
                time(series.live_peak.t_us),
                grouped(holders.len() as u64),
                bytes(known)
            );
        } else {
            out.push_str("<h3>Largest holders now</h3>\n");
        }
        if let Some(imported) = memory.stat("imported_bytes").filter(|&n| n > 0) {
            let _ = writeln!(
                out,
                "<p class=\"soft\">Beside them {} of others' memory are imported now, in {}.</p>",
                bytes(imported),
                count(memory.stat("imported").unwrap_or(0), "buffer")
            );
        }
        if holders.is_empty() {
            out.push_str("<p class=\"note\">No buffer is known.</p>\n");
            return;
        }
        out.push_str("<div class=\"two\"><div><h3>By name</h3>");
        let totals = by_tag(&holders);
        let mut table = Table::new(&["~name", "#buffers", "#bytes", "#share", ""]);
        for t in totals.iter().take(TAGS) {
            let width = (t.bytes as f64 * 6.0 / whole.max(1) as f64).min(6.0);
            table.row(&[
                self.name_of(t.tag),
                grouped(t.count),
                bytes(t.bytes),
                percent(t.bytes, whole),
                format!("<span class=\"bar\" style=\"width:{width:.2}em\"></span>"),
            ]);
        }
        out.push_str(&table.end());
        more(out, totals.len(), TAGS, "names");
        out.push_str("</div><div><h3>By buffer</h3>");
        let mut table =
            Table::new(&["~name", "#bytes", "#share", "~stream", "#allocated at", "#age", "freed"]);
        let rows = equal(&holders);
        for row in rows.iter().take(HOLDERS) {
            table.row(&self.holder(row, whole, recorded.then_some(series.live_peak.t_us)));
        }
        out.push_str(&table.end());
        let left_out = rows.iter().skip(HOLDERS).fold(0usize, |n, row| n + row.count as usize);
        more(out, HOLDERS + left_out, HOLDERS, "buffers");
        out.push_str("</div></div>\n");
    }

    /// The row of equal holders. `peak`: when the age of the first one is counted.
    fn holder(&self, equal: &Equal, whole: u64, peak: Option<u64>) -> [String; 7] {
        let (h, n) = (&equal.first, equal.count);
        let all = h.bytes.saturating_mul(n);
        let name = self.name_of(h.tag);
        let (since, age) = match (h.since, peak) {
            (Some(t), Some(peak)) => (time(t), time(peak.saturating_sub(t))),
            (None, Some(_)) => ("before the record".to_owned(), "–".to_owned()),
            (_, None) => ("–".to_owned(), "–".to_owned()),
        };
        [
            if n == 1 { name } else { format!("{} × {name} of {}", grouped(n), bytes(h.bytes)) },
            bytes(all),
            percent(all, whole),
            self.stream_of(h.stream),
            since,
            age,
            h.until.map_or_else(|| "live".to_owned(), |t| format!("at {}", time(t))),
        ]
    }

    fn fragmentation(&self, out: &mut String, sums: &Sums) {
        out.push_str("<h3>Fragmentation by segment</h3>\n");
        let memory = self.memory();
        if memory.segments.is_empty() {
            out.push_str("<p class=\"note\">The memory has no segments.</p>\n");
            return;
        }
        let _ = writeln!(
            out,
            "<p class=\"caption\"><span class=\"key live\"></span> live <span class=\"key ready\"></span> free \
             <span class=\"key pending\"></span> pending: free, a stream may still use it \
             <span class=\"key cached\"></span> cached: free, in a thread cache or on its way \
             <span class=\"key other\"></span> held back, moving or lost</p>"
        );
        let free = sums.free();
        let mut table = Table::new(&["", "#bytes", "#exact", "#share"]);
        for (what, n) in [
            ("segments", sums.bytes),
            ("live blocks", sums.live),
            ("of it rounding", sums.rounding),
            ("free", free),
            ("of it pending", sums.pending),
            ("largest free range", sums.largest),
            ("cached", sums.cached),
            ("other", sums.other),
        ] {
            table.row(&[what.to_owned(), bytes(n), grouped(n), percent(n, sums.bytes)]);
        }
        let mut order: Vec<_> = memory.segments.iter().collect();
        order.sort_by_key(|s| (std::cmp::Reverse(s.bytes), s.addr));
        let drawn = order.len().min(STRIPS);
        order.truncate(drawn);
        order.sort_by_key(|s| s.addr);
        let width = (STRIP_COLUMNS.0 / drawn).clamp(1, STRIP_COLUMNS.1);
        for segment in order {
            let own = Sums::of(segment);
            let caption = strips::caption(segment, &own);
            let label = format!("Blocks of the segment at {:#x}", segment.addr);
            let _ = writeln!(out, "<p class=\"caption\">{caption}</p>");
            out.push_str(&strips::strip(segment, width, &label, &|b| self.block(b)));
        }
        more(out, memory.segments.len(), STRIPS, "segments, smaller ones, are not drawn");
        out.push_str(&table.end());
    }

    /// The text of a block in a strip.
    fn block(&self, b: &Block) -> String {
        let mut text = match b.state {
            State::Live => {
                let name = self.memory().names.get(&b.tag);
                let name = name.map_or_else(|| "live".to_owned(), |n| Escaped(n).to_string());
                format!("{name}: {} of {}", bytes(b.requested), bytes(b.bytes))
            }
            State::Ready => format!("free: {}", bytes(b.bytes)),
            State::Pending => format!("pending: {}", bytes(b.bytes)),
            State::Cached => format!("cached: {}", bytes(b.bytes)),
            State::Other => format!("held back, moving or lost: {}", bytes(b.bytes)),
        };
        if b.stream != 0 {
            let _ = write!(text, ", {}", self.stream_of(b.stream));
        }
        text
    }

    fn events(&self, out: &mut String) {
        let memory = self.memory();
        out.push_str("<h3>Events</h3>\n");
        let notable: Vec<(&Event, usize)> = memory
            .events
            .iter()
            .filter_map(|e| Some((e, LANES.iter().position(|l| l.2.contains(&e.kind))?)))
            .collect();
        if notable.is_empty() {
            out.push_str(
                "<p class=\"note\">No growth, trim, remap, wait or failure is recorded.</p>\n",
            );
            return;
        }
        let mut sums: BTreeMap<usize, (u64, u64, u64)> = BTreeMap::new();
        for (e, lane) in &notable {
            let sum = sums.entry(*lane).or_default();
            *sum = (sum.0 + 1, sum.1.saturating_add(e.size), sum.2.max(e.size));
        }
        let mut table = Table::new(&["", "#recorded", "#in all", "#largest"]);
        for (lane, (count, all, most)) in sums {
            let kind = LANES[lane].2[0];
            table.row(&[
                LANES[lane].0.to_owned(),
                grouped(count),
                amount(kind, all),
                amount(kind, most),
            ]);
        }
        out.push_str(&table.end());
        // Failures say the most, then what made the program wait.
        let rank = |e: &Event| match e.kind {
            Kind::OutOfMemory => 0,
            Kind::HostWait => 1,
            Kind::Remap => 2,
            _ => 3,
        };
        let total = notable.len();
        let mut chosen: Vec<(usize, &Event, usize)> =
            notable.iter().enumerate().map(|(i, &(e, lane))| (i, e, lane)).collect();
        chosen.sort_by_key(|&(i, e, _)| (rank(e), std::cmp::Reverse(e.size), i));
        chosen.truncate(EVENTS);
        chosen.sort_by_key(|c| c.0);
        let open = if total <= 20 { " open=\"open\"" } else { "" };
        let _ = write!(out, "<details{open}><summary>");
        let _ = if total > EVENTS {
            write!(
                out,
                "{EVENTS} of {} events: failures first, then the longest waits, then the largest",
                grouped(total as u64)
            )
        } else {
            write!(out, "{total} event{}", if total == 1 { "" } else { "s" })
        };
        out.push_str("</summary>");
        let mut table = Table::new(&["#at", "event", "#amount", "stream", "~call site"]);
        for (_, e, lane) in chosen {
            let title = LANES[lane].0;
            table.row(&[
                time(e.t_us),
                format!(
                    "<span class=\"key {}\"></span> {}",
                    LANES[lane].1,
                    title.trim_end_matches('s')
                ),
                amount(e.kind, e.size),
                self.stream_of(e.stream),
                if e.tag == 0 { "–".to_owned() } else { self.name_of(e.tag) },
            ]);
        }
        out.push_str(&table.end());
        out.push_str("</details>\n");
    }

    fn statistics(&self, out: &mut String) {
        let stats = &self.memory().stats;
        out.push_str("<h3>Statistics</h3>\n");
        if stats.is_empty() {
            out.push_str("<p class=\"note\">The snapshot has no statistics.</p>\n");
            return;
        }
        let mut table = Table::new(&["~", "#", "#exact", "name"]);
        let mut row = |name: &str, bytes_unit: bool, what: &str, value: &Value| {
            let (short, exact) = match value.as_u64() {
                Some(u64::MAX) if name == "limit" => ("no limit".to_owned(), String::new()),
                Some(n) if bytes_unit => (bytes(n), grouped(n)),
                Some(n) => (String::new(), grouped(n)),
                None => (String::new(), Escaped(&value.to_string()).to_string()),
            };
            table.row(&[what.to_owned(), short, exact, format!("<code>{}</code>", Escaped(name))]);
        };
        for (name, bytes_unit, what) in STATS {
            if let Some(value) = stats.get(name) {
                row(name, bytes_unit, what, value);
            }
        }
        for (name, value) in stats.iter().filter(|(n, _)| !STATS.iter().any(|s| s.0 == n.as_str()))
        {
            row(name, false, "", value);
        }
        out.push_str(&table.end());
    }
}

/// The amount of an event: bytes, or the time of a wait.
fn amount(kind: Kind, size: u64) -> String {
    match kind {
        Kind::HostWait => time(size),
        Kind::StreamWait => "–".to_owned(),
        _ => bytes(size),
    }
}

/// Says how many rows a list leaves out.
fn more(out: &mut String, all: usize, shown: usize, what: &str) {
    if all > shown {
        let _ =
            writeln!(out, "<p class=\"soft\">{} more {what}</p>", grouped((all - shown) as u64));
    }
}
