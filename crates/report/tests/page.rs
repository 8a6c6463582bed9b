//! The page over hand-made snapshots: its structure, its figures, its text, its bounds.

use leasehold_report::html;
use serde_json::{Value, json};

/// Checks that a page is well-formed as XML: elements nest, attributes are quoted, and no bare `<`
/// or `&` stands in text. Returns the number of elements.
fn check(page: &str) -> usize {
    let mut rest = page.strip_prefix("<!DOCTYPE html>").expect("a document type");
    let (mut open, mut elements) = (Vec::new(), 0);
    while let Some(at) = rest.find('<') {
        text(&rest[..at]);
        let end = rest[at..].find('>').map(|n| at + n).expect("a tag ends");
        let tag = &rest[at + 1..end];
        rest = &rest[end + 1..];
        if let Some(name) = tag.strip_prefix('/') {
            assert_eq!(open.pop(), Some(name), "near {:?}", &rest[..rest.len().min(200)]);
            continue;
        }
        elements += 1;
        let (tag, empty) = tag.strip_suffix('/').map_or((tag, false), |t| (t, true));
        let (name, attributes) = tag.split_once([' ', '\n']).unwrap_or((tag, ""));
        assert!(!name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric()), "{tag}");
        let mut left = attributes.trim();
        let mut seen = Vec::new();
        while !left.is_empty() {
            let (key, value) = left.split_once("=\"").unwrap_or_else(|| panic!("{tag}"));
            let (value, next) = value.split_once('"').unwrap_or_else(|| panic!("{tag}"));
            assert!(!key.contains([' ', '"']) && !value.contains('<'), "{tag}");
            assert!(!seen.contains(&key), "twice: {tag}");
            seen.push(key);
            text(value);
            left = next.trim_start();
        }
        if !empty {
            open.push(name);
        }
    }
    text(rest);
    assert_eq!(open, Vec::<&str>::new());
    elements
}

fn text(text: &str) {
    for part in text.split('&').skip(1) {
        let entity = part.split(';').next().unwrap_or_default();
        assert!(["lt", "gt", "amp", "quot", "#39"].contains(&entity), "&{entity}");
    }
    assert!(!text.chars().any(|c| c.is_control() && c != '\n'), "{text:?}");
}

fn block(addr: u64, bytes: u64, state: &str, id: u64, tag: u32) -> Value {
    let requested = if state == "live" { bytes } else { 0 };
    json!({"addr": addr, "bytes": bytes, "requested": requested, "state": state, "stream": 1,
        "tag": tag, "id": id, "graph": false})
}

fn event(kind: &str, t_us: u64, id: u64, size: u64, tag: u32) -> Value {
    json!({"kind": kind, "t_us": t_us, "id": id, "addr": 0, "size": size, "stream": 1, "tag": tag})
}

const MIB: u64 = 1 << 20;

/// Weights of 3 MiB are held, a buffer of 5 MiB came and went, and one of 1 MiB is there.
fn small() -> Value {
    json!({
        "name": "cuda:0 memory",
        "stats": {"live": 2, "live_bytes": 4 * MIB, "live_peak": 9 * MIB, "reserved": 10 * MIB,
            "reserved_peak": 10 * MIB, "limit": 16 * MIB, "failed": 1, "allocations": 3,
            "a_new_one": 123_456},
        "segments": [{"addr": 4096, "bytes": 10 * MIB, "paged": true, "blocks": [
            block(4096, 3 * MIB, "live", 1, 7),
            block(4096 + 3 * MIB, 4 * MIB, "ready", 0, 0),
            block(4096 + 7 * MIB, MIB, "live", 3, 0),
            block(4096 + 8 * MIB, 2 * MIB, "pending", 0, 0),
        ]}],
        "events": [
            event("growth", 90, 0, 10 * MIB, 0), event("map", 90, 0, 10 * MIB, 0),
            event("alloc", 100, 1, 3 * MIB, 0),
            event("alloc", 200, 2, 5 * MIB, 0), event("alloc", 250, 3, MIB, 0),
            event("free", 300, 2, 5 * MIB, 8),
            event("host_wait", 400, 0, 2_500, 0),
            event("out_of_memory", 1_000, 0, 30 * MIB, 0),
        ],
        "events_lost": 0,
        "names": {"7": "weights", "8": "activations"},
        "streams": {"1": "compute"},
    })
}

#[test]
fn the_figures_are_those_of_the_snapshot() {
    let page = html(&small().to_string());
    check(&page);
    for (what, n) in [("live_bytes", 4 * MIB), ("live_peak", 9 * MIB), ("reserved", 10 * MIB)] {
        let exact = n.to_string();
        let (a, b) = exact.split_at(exact.len() - 3);
        let (a, c) = a.split_at(a.len() - 3);
        let row = format!("<td class=\"n\">{a},{c},{b}</td><td><code>{what}</code></td>");
        assert!(page.contains(&row), "{what}: {row}");
    }
    // One that this crate does not know stands there too.
    assert!(page.contains("123,456</td><td><code>a_new_one</code>"));
    // The peak is the events' own, and so are its holders, by names set after the allocation.
    assert!(
        page.contains("9 MiB (9,437,184 bytes) were live at 250 µs, in 3 known buffers of 9 MiB")
    );
    let at = |text: &str| page.find(text).unwrap_or_else(|| panic!("{text}"));
    assert!(at("activations</td><td class=\"n\">5 MiB") < at("weights</td><td class=\"n\">3 MiB"));
    assert!(page.contains(
        "<td class=\"t\">compute</td><td class=\"n\">200 µs</td><td class=\"n\">50 µs</td><td>at 300 µs"
    ));
    // 6 MiB lie free in two ranges.
    assert!(page.contains("external fragmentation</dt><dd>33.3 %"));
    assert!(page.contains("largest range 4 MiB"));
    // Events, with the time of a wait and the bytes of a failure.
    for text in ["host wait</td><td class=\"n\">2.5 ms", "failure</td><td class=\"n\">30 MiB"] {
        assert!(page.contains(text), "{text}");
    }
    assert!(page.contains("class=\"budget line\"") && page.contains("class=\"failure line\""));
}

#[test]
fn the_heading_has_command_and_date() {
    let heading = |made: u64| {
        let mut snapshot = small();
        snapshot["command"] = "leasehold run --report <x>.html".into();
        snapshot["made"] = made.into();
        let page = html(&snapshot.to_string());
        check(&page);
        page
    };
    for (made, date) in [
        (0, "1970-01-01 00:00"),
        (1_709_251_199, "2024-02-29 23:59"),
        (1_709_251_200, "2024-03-01 00:00"),
        (1_772_323_199, "2026-02-28 23:59"),
        (1_798_761_599, "2026-12-31 23:59"),
    ] {
        let wanted = "by <code>leasehold run --report &lt;x&gt;.html</code>";
        assert!(heading(made).contains(&format!("Made {wanted} on {date} UTC.")), "{date}");
    }
    heading(u64::MAX);
    assert!(!html(&small().to_string()).contains("Made"));
}

#[test]
fn imported_memory_and_equal_buffers_are_seen() {
    let mut snapshot = small();
    snapshot["stats"]["imported"] = 56.into();
    snapshot["stats"]["imported_bytes"] = (12 * MIB).into();
    let events = snapshot["events"].as_array_mut().expect("events");
    for id in 10..22 {
        events.insert(5, event("alloc", 250, id, MIB / 4, 8));
        events.push(event("free", 1_001 + id, id, MIB / 4, 8));
    }
    let page = html(&snapshot.to_string());
    check(&page);
    assert!(page.contains("imported</dt><dd>12 MiB<small>56 buffers of others"));
    assert!(page.contains("class=\"imported line\""), "12 MiB are near 12");
    let row = "12 × activations of 256 KiB</td><td class=\"n\">3 MiB</td>";
    assert!(page.contains(row), "{page}");
    assert_eq!(page.matches("<td>at 1.02 ms</td>").count(), 1, "one row, freed with the last");
    // Far more than what lives: the caption has it, and the curve stays tall.
    snapshot["stats"]["imported_bytes"] = (1u64 << 40).into();
    let page = html(&snapshot.to_string());
    assert!(page.contains("imported, now 1 TiB, far above the chart"));
    assert!(!page.contains("class=\"imported line\""));
}

/// The scale is that of what lives, although much more is reserved.
#[test]
fn a_small_life_fills_the_chart() {
    let mut snapshot = small();
    snapshot["stats"]["reserved"] = (900 * MIB).into();
    snapshot["stats"]["limit"] = (1u64 << 40).into();
    let page = html(&snapshot.to_string());
    check(&page);
    let top = heights(&page, "live line").into_iter().fold(f64::MAX, f64::min);
    assert!(top < 150.0, "{top}");
    assert!(page.contains("reserved at most 900 MiB, far above the chart"));
}

#[test]
fn an_empty_buffer_is_called_so() {
    let text = "{\"stats\": {\"live\": 1, \"live_bytes\": 0, \"reserved\": 5}}";
    assert!(html(text).contains("<dd>0 B<small>1 empty buffer</small>"));
    assert!(html(&text.replace("\"live\": 1", "\"live\": 0")).contains("<dd>0 B</dd>"));
}

#[test]
fn a_page_loads_nothing() {
    let page = html(&small().to_string());
    for word in ["http:", "https:", "src=", "url(", "@import", "<link", "<iframe", "fetch("] {
        assert!(!page.contains(word), "{word}");
    }
    assert!(page.contains("default-src 'none'") && page.contains("prefers-color-scheme: dark"));
}

#[test]
fn text_of_a_snapshot_is_text() {
    let evil = "<script>alert(\"x\")</script>&'\u{1}\u{202e}";
    let mut snapshot = small();
    snapshot["name"] = evil.into();
    snapshot["names"] = json!({"7": evil, "8": evil});
    snapshot["streams"] = json!({"1": evil});
    snapshot["stats"][evil] = evil.into();
    let device = json!({"device": evil, "pools": [
        {"pool": 0, "name": evil, "memory": snapshot}, {"name": evil, "memory": {}}]});
    for text in [snapshot.to_string(), device.to_string(), format!("{{\"budget\": {evil:?}}}")] {
        let page = html(&text);
        check(&page);
        // The page's own script is the only one.
        assert_eq!(page.matches("<script").count(), 1);
        assert!(!page.contains("alert(\"") && !page.contains('\u{202e}'));
    }
}

#[test]
fn input_that_says_little_gives_a_page_that_says_so() {
    for (text, says) in [
        ("", "This is no snapshot"),
        ("{", "This is no snapshot"),
        ("[]", "The snapshot is empty"),
        ("null", "This is no snapshot"),
        ("{\"events\": 7}", "This is no snapshot"),
        ("{}", "The snapshot is empty"),
        ("{\"device\": \"cpu:0\", \"pools\": []}", "The snapshot is empty"),
        ("{\"pools\": [{}]}", "says nothing of this memory"),
        ("{\"stats\": {\"reserved\": 5}}", "No events were recorded"),
        ("{\"stats\": {\"reserved\": 5}}", "has no segments"),
        ("{\"segments\": [{}]}", "has no statistics"),
        ("{\"segments\": [{\"blocks\": [{}], \"bytes\": 0}]}", "No buffer is known"),
        ("{\"events\": [{}]}", "No growth, trim, remap, wait or failure"),
        ("{\"events\": [{\"kind\": \"of tomorrow\"}]}", "Over time"),
        ("{\"events\": [{\"kind\": \"free\", \"size\": 18446744073709551615}]}", "16 EiB"),
        (
            "{\"events\": [{\"kind\": \"alloc\", \"t_us\": 18446744073709551615, \
             \"size\": 18446744073709551615}, {\"kind\": \"alloc\", \"size\": 18446744073709551615}]}",
            "16 EiB",
        ),
        (
            "{\"segments\": [{\"addr\": 18446744073709551615, \"bytes\": 18446744073709551615, \
             \"blocks\": [{\"bytes\": 18446744073709551615, \"state\": \"ready\"}, \
             {\"addr\": 18446744073709551615, \"bytes\": 18446744073709551615, \"state\": \"live\"}]}]}",
            "Fragmentation by segment",
        ),
    ] {
        let page = html(text);
        check(&page);
        assert!(page.contains(says), "{text}: no {says:?}");
    }
}

#[test]
fn events_that_were_lost_move_the_curves_beginning() {
    let mut snapshot = small();
    let events = snapshot["events"].as_array_mut().expect("events");
    events.drain(..4);
    snapshot["events_lost"] = 4.into();
    let page = html(&snapshot.to_string());
    check(&page);
    assert!(page.contains("4 older ones are lost"));
    // The peak is found from the end, and a buffer from before the record is a holder.
    assert!(
        page.contains("9 MiB (9,437,184 bytes) were live at 250 µs, in 3 known buffers of 9 MiB")
    );
    assert!(page.contains("before the record"));
}

#[test]
fn pools_share_a_page_and_their_streams_show_as_the_callers() {
    let mut memory = small();
    memory["streams"] = json!({});
    let pools: Vec<Value> = (0..20)
        .map(|i| json!({"pool": i, "name": format!("pool {i}"), "suspended": i == 1, "memory": memory}))
        .collect();
    let device = json!({"device": "cuda:1", "budget": 400 * MIB, "reserved": 200 * MIB,
        "allocated": 80 * MIB, "pools": pools, "streams": {"1": 0xabc_def0_u64}});
    let page = html(&device.to_string());
    check(&page);
    assert!(page.contains("<h1>Memory of cuda:1</h1>") && page.contains("0xabcdef0"));
    assert_eq!(page.matches("<h2>").count(), 16);
    assert!(page.contains("4 smaller pools") && page.contains(">pool 19</td>"));
    assert!(page.contains("suspended"));
    assert!(page.contains("reserved</dt><dd>200 MiB"));
}

/// The path of a curve, as points of the picture.
fn heights(page: &str, class: &str) -> Vec<f64> {
    let path = page.split(&format!("<path class=\"{class}\" d=\"")).nth(1).expect("a curve");
    let path = path.split('"').next().expect("a path");
    let first = path.trim_start_matches("M0 ").split(['H', 'V']).next().expect("a point");
    let rest = path.split('V').skip(1).map(|p| p.split('H').next().expect("a point"));
    std::iter::once(first).chain(rest).map(|n| n.parse().expect("a number")).collect()
}

#[test]
fn a_large_snapshot_gives_a_small_page_that_keeps_the_peak() {
    let (blocks, events) = (100_000u64, 1_000_000u64);
    let mut text = String::from("{\"name\":\"cuda:0 memory\",\"segments\":[");
    for s in 0..20 {
        let base = s << 40;
        text += &format!(
            "{}{{\"addr\":{base},\"bytes\":{},\"paged\":true,\"blocks\":[",
            if s > 0 { "," } else { "" },
            blocks / 20 * 8192
        );
        for i in 0..blocks / 20 {
            let state = ["live", "ready", "live", "pending", "cached"][(i * 7 % 5) as usize];
            text += &format!(
                "{}{{\"addr\":{},\"bytes\":8192,\"requested\":8000,\"state\":\"{state}\",\"id\":{},\"tag\":{}}}",
                if i > 0 { "," } else { "" },
                base + i * 8192,
                10_000_000 + s * 10_000 + i,
                i % 50
            );
        }
        text += "]}";
    }
    text += "],\"events\":[";
    // One buffer of 1 GiB lives for one microsecond among small ones.
    let spike = 700_001;
    let mut live = 0u64;
    for i in 0..events {
        let (kind, id, size) = match i {
            _ if i == spike => ("alloc", 1 << 40, 1 << 30),
            _ if i == spike + 1 => ("free", 1 << 40, 1 << 30),
            _ if i % 1000 == 0 => ("remap", 0, 2 * MIB),
            _ if i % 2 == 0 => ("alloc", i, 4096),
            _ => ("free", i - 1, 4096),
        };
        live = if kind == "alloc" {
            live + size
        } else if kind == "free" {
            live.saturating_sub(size)
        } else {
            live
        };
        text += &format!(
            "{}{{\"kind\":\"{kind}\",\"t_us\":{i},\"id\":{id},\"addr\":1234567,\"size\":{size},\"stream\":3,\"tag\":0}}",
            if i > 0 { "," } else { "" },
        );
    }
    text += "],\"stats\":{\"live_bytes\":8388608,\"reserved\":2147483648}}";
    let page = html(&text);
    check(&page);
    assert!(page.len() < 3_000_000, "{} bytes", page.len());
    assert!(page.contains("at 700 ms"), "the time of the peak");
    // The chart's top is 2 GiB, so the peak's column reaches half of its height, and no other does.
    let curve = heights(&page, "live line");
    let top = curve.iter().copied().fold(f64::MAX, f64::min);
    assert!((top - 150.0).abs() < 3.0, "{top}");
    assert!(curve.iter().filter(|y| **y < 250.0).count() <= 2, "one column");
    assert!(page.contains("remap") && page.contains("200 of 1,000 events"));
}
