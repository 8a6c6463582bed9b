//! Cases in separate processes: those about the process itself, and those whose fault ends the
//! process's use of a driver.
//!
//! # Protocol
//! The runner starts a program that calls [`answer`](crate::answer) with the case's name. The
//! program runs this one case and writes one line to its standard output: a marker, the outcome,
//! and the reason with its line ends replaced. The runner takes the first such line as the answer.
//!
//! A program that ends without an answer has failed, with the text of its standard error. A program
//! that gives no answer in time has failed too, and is killed. After its answer the program has a
//! few seconds to end.
//!
//! This module must not know what a case does.

use crate::case::{Case, Outcome, Stop, failed};
use crate::variant::Variant;
use std::fmt;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

const MARKER: &str = "\u{1}leasehold-conformance\u{1}";
/// The time limit for a program's start, and for its end after the answer.
const GRACE: Duration = Duration::from_secs(10);

type Make = dyn Fn(&str) -> Command + Send + Sync;

/// The way to start a program that runs one case.
#[derive(Clone)]
pub struct Isolation(Arc<Make>);

impl Isolation {
    /// `command` makes the command line for a case's name. The program must call
    /// [`answer`](crate::answer) with this name.
    pub fn new(command: impl Fn(&str) -> Command + Send + Sync + 'static) -> Self {
        Self(Arc::new(command))
    }

    pub(crate) fn run(&self, case: &Case, variant: Variant, limit: Duration) -> Outcome {
        let mut command = (self.0)(&name(case, variant));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = match command.spawn() {
            Ok(child) => child,
            Err(e) => return failed(format!("no process for the case: {e}")),
        };
        let said = match heard(&mut child, limit + GRACE) {
            Ok(said) => said,
            Err(e) => {
                ended(&mut child, Duration::ZERO);
                return failed(format!("no thread to hear the case's process: {e}"));
            }
        };
        let status = ended(&mut child, if said.is_some() { GRACE } else { Duration::ZERO });
        match said {
            Some(Said::Outcome(outcome)) => outcome,
            Some(Said::Nothing(errors)) => {
                failed(format!("the case's process ended ({status}) without an answer{errors}"))
            }
            None => {
                failed(format!("hangs: the case's process has not answered in {:?}", limit + GRACE))
            }
        }
    }
}

impl fmt::Debug for Isolation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Isolation")
    }
}

/// The name of a case in a variant, for another process.
pub(crate) fn name(case: &Case, variant: Variant) -> String {
    format!("{}/{}", case.number, variant.name())
}

enum Said {
    Outcome(Outcome),
    /// The end of the standard error.
    Nothing(String),
}

/// The child's output within the limit.
fn heard(child: &mut Child, limit: Duration) -> io::Result<Option<Said>> {
    let (tell, told) = mpsc::channel();
    let (Some(out), Some(err)) = (child.stdout.take(), child.stderr.take()) else {
        return Ok(None);
    };
    // Both are read to their ends, so that the child never blocks. Both end with the child, which
    // is ended in time.
    let (tell_errors, errors) = mpsc::channel();
    let reader = std::thread::Builder::new;
    reader().spawn(move || {
        let mut text = Vec::new();
        let _ = BufReader::new(err).read_to_end(&mut text);
        let _ = tell_errors.send(String::from_utf8_lossy(&text).into_owned());
    })?;
    reader().spawn(move || {
        let mut answer = None;
        for line in BufReader::new(out).split(b'\n').map_while(Result::ok) {
            if let Some(outcome) = parse(&String::from_utf8_lossy(&line)) {
                let _ = tell.send(Some(outcome));
                answer = Some(());
            }
        }
        if answer.is_none() {
            let _ = tell.send(None);
        }
    })?;
    Ok(match told.recv_timeout(limit) {
        Err(_) => None,
        Ok(Some(outcome)) => Some(Said::Outcome(outcome)),
        Ok(None) => {
            let text = errors.recv_timeout(GRACE).unwrap_or_default();
            let tail: Vec<&str> = text.lines().rev().take(20).collect();
            let tail: String = tail.into_iter().rev().flat_map(|l| ["\n", l]).collect();
            Some(Said::Nothing(tail))
        }
    })
}

/// Waits for the child's end, kills it after the limit, and describes how it ended.
fn ended(child: &mut Child, grace: Duration) -> String {
    let start = Instant::now();
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return status.to_string(),
            Ok(None) if start.elapsed() < grace => std::thread::sleep(Duration::from_millis(2)),
            _ => {
                let _ = child.kill();
                return child.wait().map_or_else(|e| e.to_string(), |s| s.to_string());
            }
        }
    }
}

fn parse(line: &str) -> Option<Outcome> {
    let rest = &line[line.find(MARKER)? + MARKER.len()..];
    let (word, why) = rest.split_once(' ')?;
    let why = why.replace('\u{1f}', "\n");
    Some(match word {
        "passed" => Ok(()),
        "skipped" => Err(Stop::Skipped(why)),
        _ => Err(Stop::Failed(why)),
    })
}

/// Writes the outcome of the one case of this process to standard output.
pub(crate) fn tell(outcome: Outcome) {
    let (word, why) = match outcome {
        Ok(()) => ("passed", String::new()),
        Err(Stop::Skipped(why)) => ("skipped", why),
        Err(Stop::Failed(why)) => ("failed", why),
    };
    let mut out = std::io::stdout().lock();
    // A closed output means that no reader is left.
    let _ = writeln!(out, "{MARKER}{word} {}", why.replace('\n', "\u{1f}"));
    let _ = out.flush();
}
