//! `bench`: every figure is there.

use super::*;
use std::collections::BTreeSet;

#[test]
fn the_allocators_benchmark_reports_every_peer() {
    let quick = ["bench", "alloc", "--json", "--rounds", "1", "--pairs", "100", "--threads", "1,2"];
    let report = json(&[&quick[..], &["--workload", "64 live"]].concat());
    assert_eq!(report["threads"], serde_json::json!([1, 2]));
    let figures = report["workloads"].as_array().unwrap();
    let names: BTreeSet<&str> = figures.iter().map(|f| f["allocator"].as_str().unwrap()).collect();
    for name in ["leasehold", "leasehold, Runtime::alloc", "system allocator"] {
        assert!(names.contains(name), "{names:?}");
    }
    for f in figures {
        let own = f["allocator"].as_str().unwrap().starts_with("leasehold");
        assert_eq!(f["kind"], if own { "own" } else { "peer" }, "{f}");
        let whole = f["ns"].is_null() && f["slower"].is_null();
        assert!(
            whole || f["ns"].as_f64().unwrap() > 0.0 && f["slower"].as_f64().unwrap() > 0.0,
            "{f}"
        );
    }
    assert_eq!(figures.len(), 3 * 2 * names.len());
    assert_eq!(report["growth"]["small"]["64 live"], 1.0);
    assert!(report["speedup"]["small, 64 live"].as_f64().unwrap() > 0.0);
    assert_eq!(report["replays"], serde_json::json!([]));
    let report = json(
        &[&quick[..], &["--workload", "ping-pong 4", "--trace", &trace("gpt2_train")]].concat(),
    );
    let replays = report["replays"].as_array().unwrap();
    assert_eq!(replays.len(), 1);
    assert!(
        replays
            .iter()
            .all(|r| r["ns_per_op"].as_f64().unwrap() > 0.0 && r["ratio"].as_f64().unwrap() >= 1.0)
    );
    let output = call(&["bench", "alloc", "--workload", "tango"]);
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(text.starts_with("leasehold: --workload tango: none of ping-pong 4 KiB, "), "{text}");
}

#[test]
fn benchmarks_with_a_device_run_over_simulated_drivers() {
    let decode = ["bench", "decode", "--tokens", "2", "--repeat", "1", "--sim", "--json"];
    let copy = ["bench", "copy", "--kib", "4", "--rounds", "1", "--sim", "--json"];
    for device in ["cuda:0", "mps:0"] {
        for what in [&decode, &copy] {
            let report = json(&[&what[..], &["--device", device]].concat());
            assert_eq!((&report["device"], &report["simulated"]), (&device.into(), &true.into()));
        }
    }
    let suspend = ["bench", "suspend", "--tokens", "3", "--rounds", "2", "--json", "--sim"];
    for device in ["cuda:0", "sim:0"] {
        let report = json(&[&suspend[..], &["--device", device]].concat());
        assert_eq!((&report["rounds"], &report["texts_equal"]), (&2.into(), &2.into()));
        let number = |name: &str| report[name].as_u64().unwrap();
        assert!(number("bytes") > 0, "{report}");
        assert_eq!(number("free_before") + number("bytes"), number("free_suspended"), "{report}");
    }
    let text = String::from_utf8(
        call(&["bench", "suspend", "--device", "mps:0", "--sim", "--rounds", "1"]).stderr,
    )
    .unwrap();
    assert!(text.contains("mps:0 cannot be suspended"), "{text}");
    let output = call(&["bench", "decode", "--sim"]);
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(text.contains("the CPU has no driver to simulate"), "{text}");
}

#[test]
fn the_benchmark_of_copies_reports_every_size_and_offset() {
    let report =
        json(&["bench", "copy", "--kib", "4,64", "--rounds", "2", "--threads", "1", "--json"]);
    let figures = report["figures"].as_array().unwrap();
    let places: Vec<_> = figures
        .iter()
        .map(|f| (f["bytes"].as_u64().unwrap(), f["offset"].as_u64().unwrap()))
        .collect();
    let expect = [4096, 65536]
        .map(|bytes| [0, 1, 16, 32, 64, 128, 2048].map(|offset| (bytes, offset)))
        .concat();
    assert_eq!(places, expect);
    for f in figures {
        let all = ["download", "upload", "plain", "download_by_plain"]
            .map(|name| f[name].as_f64().unwrap());
        assert!(all.iter().all(|&v| v > 0.0), "{f}");
    }
    let fresh = report["fresh"].as_array().unwrap();
    assert!(fresh.len() == 2 && fresh.iter().all(|f| f["new"].as_f64().unwrap() > 0.0), "{report}");
    let output = call(&["bench", "copy", "--kib", "1", "--rounds", "1"]);
    assert!(
        output.status.success()
            && String::from_utf8(output.stdout).unwrap().contains("copy_from_slice")
    );
}
