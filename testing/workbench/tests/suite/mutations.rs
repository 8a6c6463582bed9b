//! Damaged traces, from a seed. The command ends in time with status 0 or 1 and prints at most one
//! line of errors.

use super::dice::{Dice, bytes_mutated};
use super::*;
use std::fs;
use std::io::Write;
use std::process::{Command, Stdio};

/// A valid trace.
fn trace(dice: &mut Dice) -> String {
    let mut text =
        dice.of(&["", "t_us,op,id,size,stream\n", "\u{feff}t_us,op,id,size,stream\r\n"]).to_owned();
    let (mut live, streams) = (Vec::new(), dice.of(&[1, 2, 30]));
    let top = dice.of(&[64, 4096, 1 << 20, 1 << 26]);
    for t in 0..dice.of(&[1, 10, 300]) {
        let stream = dice.below(streams);
        if !live.is_empty() && dice.below(100) < 48 {
            let id: usize = live.swap_remove(dice.below(live.len()));
            text += &format!("{t},f,{id},0,{stream}\n");
        } else {
            let drawn = dice.below(top);
            let size = dice.of(&[0, 1, 513, (2 << 20) + 1, drawn]);
            text += &format!("{t},a,{t},{size},{stream}\n");
            live.push(t);
        }
    }
    text
}

fn damaged(dice: &mut Dice, text: &str) -> Vec<u8> {
    let mut bytes = text.as_bytes().to_vec();
    for _ in 0..dice.of(&[1, 1, 3, 20]) {
        let at = dice.below(bytes.len() + 1);
        match dice.below(4) {
            0 if at < bytes.len() => bytes[at] = dice.below(256) as u8,
            1 => bytes.truncate(at),
            2 => {
                let line = dice.of(&[
                    "\n0,a,999999,18446744073709551615,0\n",
                    "\n0,a,999998,9223372036854775807,0\n",
                    "\n0,a,999997,1099511627776,9\n",
                    "\n0,f,1,1,18446744073709551615\n",
                ]);
                bytes.splice(at..at, line.bytes());
            }
            _ => {
                let text = dice
                    .of(&[
                        ",",
                        "\n",
                        "\r",
                        "-",
                        "\u{0}",
                        "\u{1b}[2J",
                        "18446744073709551616",
                        "٣",
                        "\u{feff}",
                        "1e9",
                    ])
                    .to_owned();
                let text = if dice.below(8) == 0 { "9".repeat(400) } else { text };
                bytes.splice(at..at, text.bytes());
            }
        }
    }
    bytes
}

#[test]
fn damaged_traces_end_in_a_line_and_whole_ones_are_played() {
    let dir = tempfile::tempdir().unwrap();
    for seed in 0..160 {
        let mut dice = Dice::new(seed + 1000);
        let text = trace(&mut dice);
        let whole = dice.below(10) < 4;
        let mut bytes = if whole { text.into_bytes() } else { damaged(&mut dice, &text) };
        let packed = dice.below(3) == 0;
        if packed {
            bytes = gzip(&bytes);
            if !whole && dice.below(2) == 0 {
                bytes_mutated(&mut dice, &mut bytes);
            }
        }
        let path = dir.path().join(if packed { "t.csv.gz" } else { "t.csv" });
        fs::write(&path, bytes).unwrap();
        let mut arguments = vec!["replay", path.to_str().unwrap()];
        arguments.extend(dice.of(&[
            &[][..],
            &["--budget", "1.5"],
            &["--budget", "1e-9"],
            &["--budget", "1e30"],
            &["--find-min-budget"],
        ]));
        arguments.extend(dice.of(&[
            &[][..],
            &["--threads", "3"],
            &["--repeat", "3"],
            &["--threads", "2", "--repeat", "2"],
        ]));
        arguments.extend(dice.of(&[&[][..], &["--peer", "system"], &["--policy", "compact"]]));
        arguments.extend(dice.of(&[&[][..], &["--lag", "0"], &["--lag", "1000000"]]));
        let status = judged(&format!("seed {seed}: {arguments:?}"), &arguments);
        let unbounded = !arguments.iter().any(|a| a.contains("budget"));
        assert!(
            !(whole && unbounded && status == 1),
            "seed {seed}: {arguments:?}: a trace that is whole is refused"
        );
    }
}

/// Bytes in `gzip`'s format.
fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut child = Command::new("gzip")
        .arg("-c")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    // The output is smaller than the pipe's buffer, so the write does not block.
    child.stdin.take().unwrap().write_all(bytes).unwrap();
    child.wait_with_output().unwrap().stdout
}
