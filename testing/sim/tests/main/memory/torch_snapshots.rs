//! Snapshots of PyTorch as traces. `snapshots/make.py` writes the files with CPython's `pickle`.

use leasehold_sim::memory::trace::{Event, Recording, Trace};
use std::fmt::Write as _;
use std::path::PathBuf;

fn at(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/main/memory/snapshots").join(name)
}

fn error(file: &[u8], device: Option<usize>) -> String {
    Recording::read(file, "s.pickle", device).map_or_else(|e| e.to_string(), |r| format!("{r:?}"))
}

/// A snapshot in the first protocol: the events of device 0 and the blocks of a segment.
fn snapshot(events: &[(&str, u64, u64, i64, u64)], blocks: &[(u64, u64, &str)]) -> Vec<u8> {
    let mut text = "(dVdevice_traces\n(l(l".to_owned();
    for (action, addr, size, stream, time) in events {
        write!(
            text,
            "(dVaction\nV{action}\nsVaddr\nL{addr}L\nsVsize\nL{size}L\nsVstream\nI{stream}\nsVtime_us\nI{time}\nsa"
        )
        .unwrap();
    }
    text += "asVsegments\n(l(dVdevice\nI0\nsVstream\nI0\nsVblocks\n(l";
    for (addr, size, state) in blocks {
        write!(text, "(dVaddress\nI{addr}\nsVsize\nI{size}\nsVstate\nV{state}\nsa").unwrap();
    }
    (text + "sas.").into_bytes()
}

/// The trace's events as text: allocations `+size`, frees `-size`.
fn events(file: &[u8]) -> String {
    let trace = Recording::read(file, "s.pickle", None).unwrap().trace;
    let sign = |alloc| if alloc { '+' } else { '-' };
    trace.events.iter().map(|e| format!("{}{} ", sign(e.alloc), e.size)).collect()
}

#[test]
fn a_snapshot_of_every_protocol_is_the_trace_by_hand() {
    let expect = Trace::open(&at("trace.csv")).unwrap();
    for protocol in 0..6 {
        let path = at(&format!("protocol{protocol}.pickle"));
        let read = Recording::open(&path, None).unwrap();
        assert_eq!(read.trace, expect, "protocol {protocol}");
        assert_eq!(
            read.left_out.as_deref(),
            Some("device 0 of the snapshot; left out: 1 events of device 1")
        );
        let other = Recording::open(&path, Some(1)).unwrap();
        assert_eq!((other.trace.events.len(), other.trace.peak), (1, 64 << 20));
        for (device, words) in [(2, "no events"), (3, "device 3: the snapshot has 3")] {
            let text = Recording::open(&path, Some(device)).unwrap_err().to_string();
            assert!(text.contains(words), "{text}");
        }
    }
    let text = error(b"0,a,1,8,0\n", Some(0));
    assert!(
        text.ends_with("s.pickle: text, which has no device 0; a snapshot of PyTorch has devices")
    );
}

#[test]
fn the_content_decides_on_the_form_of_a_file() {
    use std::io::Write as _;
    for name in ["trace.csv", "protocol0.pickle", "protocol5.pickle"] {
        let plain = std::fs::read(at(name)).unwrap();
        let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        packed.write_all(&plain).unwrap();
        let packed = packed.finish().unwrap();
        let expect = Trace::read(&plain[..], "plain").unwrap();
        assert_eq!(Trace::read(&packed[..], "packed").unwrap(), expect, "{name}");
        let text = error(&packed[..packed.len() / 2], None);
        assert!(text.starts_with("invalid argument: s.pickle"), "{text}");
    }
}

#[test]
fn blocks_that_the_history_does_not_explain_are_derived() {
    // Live throughout; freed without an allocation; freed twice; allocated over a live block.
    let live =
        [(900, 7, "active_allocated"), (901, 8, "active_awaiting_free"), (902, 9, "inactive")];
    let history = [
        ("free_completed", 100, 50, 0, 1),
        ("free_completed", 100, 50, 0, 2),
        ("alloc", 200, 60, 0, 3),
        ("alloc", 200, 61, 0, 4),
        ("segment_free", 200, 1000, 0, 5),
        ("free_requested", 200, 61, 0, 6),
    ];
    assert_eq!(events(&snapshot(&history, &live)), "+50 +7 -50 +60 -60 +61 -61 ");
    // Live at the end, and free in the history before: allocated without a record.
    let history = [("alloc", 100, 50, 0, 1), ("free_completed", 100, 50, 0, 2)];
    let live = [(100, 77, "active_allocated")];
    assert_eq!(events(&snapshot(&history, &live)), "+50 -50 +77 ");
    // Of the same block: one allocation.
    let history = [("alloc", 100, 50, 0, 1)];
    assert_eq!(events(&snapshot(&history, &live)), "+50 ");
    // Clocks may step back.
    let history = [("alloc", 1, 1, 0, 500), ("alloc", 2, 1, 0, 400), ("alloc", 3, 1, 0, 700)];
    let trace = Trace::read(&snapshot(&history, &[])[..], "s").unwrap();
    assert_eq!(trace.events.iter().map(|e| e.t_us).collect::<Vec<_>>(), [0, 0, 200]);
}

#[test]
fn what_is_no_snapshot_is_one_line_with_a_reason() {
    for (file, device, words) in [
        (&b"cos\nsystem\n(S'true'\ntR."[..], None, "s.pickle, line 1"),
        (
            b"\x80\x04\x8c\x02os\x94\x8c\x06system\x94\x93\x94\x8c\x04true\x94\x85\x94R\x94.",
            None,
            "s.pickle: byte 16: STACK_GLOBAL: a class, a function",
        ),
        (b"(S'true'\nios\nsystem\n.", None, "s.pickle: byte 9: INST"),
        (
            b"\x80\x04]\x94.",
            None,
            "s.pickle: a pickle, but no memory snapshot of PyTorch: it has no `device_traces`",
        ),
        (b"}Vdevice_traces\nK\x01s.", None, "no `device_traces`"),
        (b"}Vdevice_traces\n]s.", None, "the snapshot has 0"),
        (
            b"}Vdevice_traces\n]]as.",
            None,
            "call torch.cuda.memory._record_memory_history() before the work",
        ),
        (
            b"}Vdevice_traces\n(l](K\x01K\x02eas.",
            None,
            "a snapshot without allocations of device 0",
        ),
        (b"\x80\x04}", None, "the file ends here"),
        (
            b"\xff\xfe\x00binary",
            None,
            "line 1: no UTF-8 text; a trace is text of t_us,op,id,size,stream, or a pickle of torch.cuda.memory._dump_snapshot",
        ),
    ] {
        let text = error(file, device);
        assert!(text.contains(words) && text.lines().count() == 1, "{file:?}: {text}");
    }
    for (events, words) in [
        (("alloc", 1, u64::MAX, 0, 1), None),
        (("alloc", 1, 8, -1, 1), Some("event 0 of device 0: `stream` is no number from 0 on")),
    ]
    .map(|(event, words)| (snapshot(&[event], &[]), words))
    {
        let text = error(&events, None);
        assert!(words.is_none_or(|w| text.ends_with(w)), "{text}");
    }
    let twice = [("alloc", 1, u64::MAX, 0, 1), ("alloc", 2, 1, 0, 1)];
    assert!(error(&snapshot(&twice, &[]), None).ends_with("the live sizes overflow"));
    let many: Vec<_> = (0..65_537).map(|i| ("alloc", i, 1, i as i64, i)).collect();
    assert!(error(&snapshot(&many, &[]), None).ends_with("more than 65,536 streams"));
    assert_eq!(Trace::read(&snapshot(&many[1..], &[])[..], "s").unwrap().streams, 65_536);
}

#[test]
fn damaged_snapshots_are_errors_or_traces() {
    let mut seed = 11_u64;
    let mut dice = move |n: usize| {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        (seed >> 11) as usize % n
    };
    let (mut good, mut bad) = (0, 0);
    for protocol in [0, 1, 2, 4, 5] {
        let whole = std::fs::read(at(&format!("protocol{protocol}.pickle"))).unwrap();
        for _ in 0..400 {
            let mut file = whole.clone();
            for _ in 0..1 + dice(3) {
                let place = dice(file.len());
                match dice(4) {
                    0 => file[place] = dice(256) as u8,
                    1 => drop(file.remove(place)),
                    2 => file.insert(place, b"N(0.12e]}"[dice(9)]),
                    _ => file.truncate(place.max(1)),
                }
            }
            match Recording::read(&file[..], "s", Some(dice(3))) {
                Ok(Recording { trace, .. }) => {
                    good += 1;
                    // The trace is consistent: its text is read too.
                    let line = |e: &Event| {
                        let Event { t_us, id, size, stream, .. } = e;
                        format!("{t_us},{},{id},{size},{stream}\n", if e.alloc { 'a' } else { 'f' })
                    };
                    let text: String = trace.events.iter().map(line).collect();
                    let again = Trace::read(text.as_bytes(), "again").unwrap();
                    assert_eq!((again.peak, again.events.len()), (trace.peak, trace.events.len()));
                }
                Err(e) => {
                    bad += 1;
                    assert_eq!(e.to_string().lines().count(), 1, "{e}");
                }
            }
        }
    }
    assert!(good > 50 && bad > 500, "{good} {bad}");
}
