//! `run --ranks` and `bench decode --ranks` on simulated devices, beside the CPU.

use super::*;
use std::time::{Duration, Instant};

#[test]
fn ranks_give_the_golden_ids_of_one_rank() {
    for (at, device) in
        [&["--device", "sim:0"][..], &["--device", "cuda:0", "--sim"]].into_iter().enumerate()
    {
        let (prompt, greedy) = golden(at);
        let more = ["--ranks", "4", "--prompt-ids", &prompt, "--tokens", "12", "--json"];
        let report = json(&[&["run"], device, &more].concat());
        let found = report["output_ids"].as_array().unwrap();
        assert_eq!(found[..], greedy.as_array().unwrap()[..found.len()], "{device:?}");
        assert_eq!((found.len(), &report["ranks"]), (12, &4.into()));
        assert_eq!((&report["ranks_agree"], &report["modes_agree"]), (&true.into(), &true.into()));
    }
}

/// The others would wait for it. On simulated CUDA nothing but the command's end ends their wait.
#[test]
fn a_rank_that_is_lost_ends_the_command_and_is_named() {
    for device in [&["--device", "sim:0"][..], &["--device", "cuda:0", "--sim"]] {
        // The time until the rank is lost is not counted.
        let arguments = ["--ranks", "4", "--tokens", "10", "--mode", "eager", "--json"];
        let begin = Instant::now();
        let whole = call(&[&["run"], device, &arguments].concat());
        assert!(whole.status.success());
        let (usual, begin) = (begin.elapsed(), Instant::now());
        let lost = call(&[&["run"], device, &arguments, &["--kill", "2@5"]].concat());
        let took = begin.elapsed();
        assert_eq!((lost.status.code(), lost.stdout.is_empty()), (Some(1), true), "{device:?}");
        assert_eq!(failure(&lost), "rank 2: ended at token 5 by --kill", "{device:?}");
        assert!(took < 3 * usual + Duration::from_secs(5), "{device:?}: {took:?} of {usual:?}");
    }
}

#[test]
fn ranks_are_measured_beside_one_rank() {
    for (device, more) in [
        (&["--device", "cpu:0"][..], &["--prompt", "20"][..]),
        (&["--device", "cuda:0", "--sim"], &["--batch", "2"]),
    ] {
        let arguments = ["--ranks", "2", "--tokens", "4", "--repeat", "2", "--json"];
        let report = json(&[&["bench", "decode"], device, &arguments, more].concat());
        assert_eq!(report["ranks"], 2, "{report}");
        for side in ["one_rank", "all_ranks"] {
            for rate in ["prompt_tokens_per_s", "tokens_per_s", "step_ms_p50"] {
                assert!(report[side][rate].as_f64().unwrap() > 0.0, "{side} {rate}: {report}");
            }
        }
        assert!(report["ratio"].as_f64().unwrap() > 0.0 && !report["prompt_ratio"].is_null());
        let bytes = |of: &str| report[of].as_u64().unwrap();
        // Half of the layers, and all of the table.
        assert!((bytes("part_bytes") as f64) < 0.8 * bytes("weight_bytes") as f64, "{report}");
        let differ = report["logits_differ_from_one_rank"].as_f64().unwrap();
        assert!(differ > 0.0 && differ < 1e-3, "{differ}");
    }
    let refused = call(&["bench", "decode", "--ranks", "2", "--batch", "2", "--join", "9"]);
    assert!(failure(&refused).contains("--join"), "{}", failure(&refused));
}

#[test]
fn metal_has_no_collectives() {
    let output = call(&["run", "--tokens", "2", "--ranks", "2", "--device", "mps:0", "--sim"]);
    let line = failure(&output);
    assert_eq!(output.status.code(), Some(2), "{line}");
    assert!(line.contains("mps:0") && line.contains("no collectives"), "{line}");
}
