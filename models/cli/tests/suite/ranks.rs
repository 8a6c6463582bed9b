//! `run --ranks`: a model over several ranks, as threads and under a launcher's variables.

use super::*;
use std::process::Stdio;
use std::time::{Duration, Instant};

#[test]
fn ranks_give_the_golden_ids_of_one_rank() {
    let (prompt, greedy) = golden(0);
    let run = ["run", "--device", "cpu", "--ranks", "2", "--prompt-ids", &prompt];
    let report = json(&[&run[..], &["--tokens", "48", "--json"]].concat());
    assert_eq!((&report["output_ids"], &report["ranks"]), (&greedy, &2.into()));
    assert_eq!((&report["ranks_agree"], &report["modes_agree"]), (&true.into(), &true.into()));
    // One rank has none to agree with.
    let alone = json(&["run", "--ranks", "1", "--tokens", "2", "--json"]);
    assert_eq!((alone["ranks"].as_u64(), alone["ranks_agree"].is_null()), (Some(1), true));
}

#[test]
fn the_text_of_ranks_is_printed_once() {
    let prompt = ["run", "--prompt", "import os", "--tokens", "6", "--mode", "graph"];
    let texts = [&prompt[..], &[&prompt[..], &["--ranks", "2"]].concat()].map(|arguments| {
        let output = call(arguments);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    });
    let text = |all: &str| all.split("\n\n").next().unwrap().to_owned();
    assert_eq!(text(&texts[0]), text(&texts[1]));
    assert_eq!(texts[1].matches("import os").count(), 1);
    assert!(texts[1].contains("the first of 2 ranks"), "{}", texts[1]);
    assert!(texts[1].contains("all ranks agree to the bit"), "{}", texts[1]);
}

/// A request for a report ends nothing.
#[test]
#[cfg(target_os = "linux")]
fn a_signal_shows_what_each_rank_does() {
    use std::io::{BufRead, BufReader};
    let mut run = command()
        .args(["run", "--ranks", "2", "--tokens", "200", "--mode", "eager"])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let id = run.id().to_string();
    // Before it listens, the signal would end it.
    let listens = || {
        let status = std::fs::read_to_string(format!("/proc/{id}/status")).unwrap();
        let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap();
        u64::from_str_radix(caught.trim(), 16).unwrap() & (1 << (10 - 1)) != 0
    };
    let until = Instant::now() + Duration::from_secs(120);
    while !listens() {
        assert!(Instant::now() < until, "it does not listen");
        std::thread::sleep(Duration::from_millis(5));
    }
    let ask = || std::process::Command::new("kill").args(["-USR1", &id]).status().unwrap();
    assert!(ask().success());
    let lines = BufReader::new(run.stderr.take().unwrap()).lines().map_while(Result::ok);
    let told: Vec<String> = lines.filter(|line| line.starts_with("rank ")).take(2).collect();
    assert!(told[0].starts_with("rank 0: ") && told[1].starts_with("rank 1: "), "{told:?}");
    assert!(run.wait().unwrap().success());
}

/// The others would wait for it.
#[test]
fn a_rank_that_is_lost_ends_the_command_and_is_named() {
    // The time until the rank is lost is not counted.
    let run = ["run", "--ranks", "4", "--tokens", "10", "--mode", "eager", "--json"];
    let begin = Instant::now();
    assert!(call(&run).status.success());
    let (usual, begin) = (begin.elapsed(), Instant::now());
    let lost = call(&[&run[..], &["--kill", "2@5"]].concat());
    let took = begin.elapsed();
    assert_eq!((lost.status.code(), lost.stdout.is_empty()), (Some(1), true));
    assert_eq!(failure(&lost), "rank 2: ended at token 5 by --kill");
    assert!(took < 3 * usual + Duration::from_secs(5), "{took:?} of {usual:?}");
}

#[test]
fn what_ranks_cannot_do_is_refused_with_the_cure() {
    for (arguments, words) in [
        (&["--ranks", "3"][..], &["3 ranks", "8 heads", "take 1, 2, 4 or 8 ranks"][..]),
        (&["--ranks", "0"], &["--ranks"]),
        (&["--ranks", "2", "--kill", "2@1"], &["no rank 2 of 2"]),
        (&["--ranks", "2", "--kill", "2"], &["1@40"]),
        (&["--kill", "0@1"], &["--ranks"]),
        (&["--ranks", "2", "--hosts", "2"], &["--hosts", "cuda:0"]),
        (&["--ranks", "2", "--device", "mps:0"], &["mps:0", "no collectives"]),
        (&["--ranks", "2", "--trace", "-"], &["--trace", "one rank"]),
    ] {
        let output = call(&[&["run", "--tokens", "2"], arguments].concat());
        let line = failure(&output);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {line}");
        assert!(words.iter().all(|word| line.contains(word)), "{arguments:?}: {line}");
    }
}

/// Copies on GPUs. Without GPUs the command says so before it starts any.
#[test]
#[cfg(feature = "cuda")]
fn ranks_without_gpus_are_refused_at_once() {
    let output = call(&["run", "--device", "cuda", "--ranks", "65000", "--tokens", "2"]);
    let line = failure(&output);
    assert_eq!(output.status.code(), Some(2), "{line}");
    let output = call(&["run", "--device", "cuda:30", "--ranks", "2", "--tokens", "2"]);
    let line = self::failure(&output);
    assert_eq!(output.status.code(), Some(1), "{line}");
    assert!(line.contains("cuda:30"), "{line}");
}

/// The variables of a launcher for a rank of two on one host, and the port of its own store.
type Launcher = fn(rank: &str, port: &str) -> Vec<(&'static str, String)>;

fn torchrun(rank: &str, port: &str) -> Vec<(&'static str, String)> {
    let two = || "2".to_owned();
    vec![
        ("RANK", rank.to_owned()),
        ("LOCAL_RANK", rank.to_owned()),
        ("WORLD_SIZE", two()),
        ("LOCAL_WORLD_SIZE", two()),
        ("GROUP_RANK", "0".to_owned()),
        ("MASTER_ADDR", "127.0.0.1".to_owned()),
        ("MASTER_PORT", port.to_owned()),
    ]
}

fn mpirun(rank: &str, port: &str) -> Vec<(&'static str, String)> {
    vec![
        ("OMPI_COMM_WORLD_RANK", rank.to_owned()),
        ("OMPI_COMM_WORLD_SIZE", "2".to_owned()),
        ("OMPI_COMM_WORLD_LOCAL_RANK", rank.to_owned()),
        // By `mpirun -x`.
        ("MASTER_ADDR", "127.0.0.1".to_owned()),
        ("MASTER_PORT", port.to_owned()),
    ]
}

fn srun(rank: &str, port: &str) -> Vec<(&'static str, String)> {
    let store: u16 = port.parse::<u16>().unwrap() + 1;
    vec![
        ("SLURM_PROCID", rank.to_owned()),
        ("SLURM_NTASKS", "2".to_owned()),
        ("SLURM_LOCALID", rank.to_owned()),
        ("LEASEHOLD_STORE", format!("tcp://127.0.0.1:{store}")),
    ]
}

/// A port whose successor is free too.
fn port() -> String {
    loop {
        let first = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = first.local_addr().unwrap().port();
        if port < u16::MAX && std::net::TcpListener::bind(("127.0.0.1", port + 1)).is_ok() {
            return port.to_string();
        }
    }
}

/// Between processes the CPU has no collectives. Each process says so at once, and waits for no
/// other.
#[test]
fn a_launchers_process_on_the_cpu_is_told_its_variable_and_the_cure() {
    for (launcher, variable) in
        [(torchrun as Launcher, "RANK"), (mpirun, "OMPI_COMM_WORLD_RANK"), (srun, "SLURM_PROCID")]
    {
        let port = port();
        for rank in ["0", "1"] {
            let mut command = command();
            command.args(["run", "--tokens", "2", "--json"]).envs(launcher(rank, &port));
            let (begun, output) = (Instant::now(), command.output().unwrap());
            assert!(begun.elapsed() < Duration::from_secs(20), "it has waited for the others");
            let line = failure(&output);
            assert_eq!((output.status.code(), output.stdout.is_empty()), (Some(2), true), "{line}");
            assert!(line.starts_with(&format!("rank {rank} of 2: {variable}={rank} ")), "{line}");
            assert!(line.contains("give --ranks 2 without a launcher"), "{line}");
        }
        // A text of the process's own.
        let mut alone = command();
        alone.args(["run", "--tokens", "2", "--json", "--ranks", "1"]).envs(launcher("1", &port));
        let output = alone.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
}

/// On GPUs a launcher's process starts itself anew with NCCL's variables, and takes the device of
/// its rank on the host. This device is not there.
#[test]
#[cfg(all(unix, feature = "cuda"))]
fn a_launchers_process_on_gpus_is_a_rank_with_its_own_device() {
    let mut command = command();
    command.args(["run", "--device", "cuda:30", "--tokens", "2"]);
    let output = command.envs(torchrun("0", &port())).env("LOCAL_RANK", "1").output().unwrap();
    let line = failure(&output);
    assert_eq!(output.status.code(), Some(1), "{line}");
    assert!(line.starts_with("rank 0: ") && line.contains("cuda:31"), "{line}");
}

/// A device that is not there, so nothing but the variables is looked at.
#[test]
#[cfg(feature = "cuda")]
fn a_launchers_environment_without_a_store_names_the_cure() {
    let mut command = command();
    command.args(["run", "--device", "cuda:30", "--tokens", "2"]);
    command.env("SLURM_PROCID", "0").env("SLURM_NTASKS", "4").env("SLURM_STEP_NUM_TASKS", "4");
    let line = failure(&command.output().unwrap());
    for word in ["SLURM_PROCID=0", "SLURM_NTASKS=4", "LEASEHOLD_STORE", "--ranks 1"] {
        assert!(line.contains(word), "{word}: {line}");
    }
}

/// The script of a batch job, and a task of its own.
#[test]
fn a_process_alone_of_slurms_is_one_rank() {
    for tasks in ["4", "1"] {
        let mut command = command();
        command.args(["run", "--tokens", "2", "--json"]);
        command.env("SLURM_LOCALID", "0").env("SLURM_JOB_ID", "77");
        let output = command.env("SLURM_PROCID", "0").env("SLURM_NTASKS", tasks).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
}

/// As a shell leaves a variable that it has cleared.
#[test]
fn an_empty_variable_names_no_rank() {
    let mut command = command();
    command.args(["run", "--ranks", "2", "--tokens", "2", "--json"]).env("LEASEHOLD_RANK", "");
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["ranks"], 2);
}
