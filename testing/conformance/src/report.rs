//! The results of a run.
//!
//! This module must not know how cases are run.

use crate::case::Tier;
use std::fmt;

/// The result of one run of one case.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case", tag = "status", content = "why")]
pub enum Status {
    /// The statement is true.
    Passed,
    /// The statement is false; the text describes the failure.
    Failed(String),
    /// The case was not run, or ended because it does not apply; the text is the reason.
    Skipped(String),
    /// The case is known to fail, and failed.
    ExpectedFailure(String),
    /// The case is known to fail, and passed: the expectation is out of date.
    UnexpectedPass(String),
}

/// One run of one case.
#[derive(Debug, Clone, serde::Serialize)]
pub struct CaseResult {
    /// The number.
    pub case: u16,
    /// The statement.
    pub name: &'static str,
    /// The interface.
    pub tier: Tier,
    /// The variant: `plain`, `validated+replayed`, ….
    pub variant: String,
    /// The result.
    #[serde(flatten)]
    pub status: Status,
    /// The duration in milliseconds.
    pub ms: f64,
}

/// The results of a run.
#[derive(Debug, Clone, Default, serde::Serialize)]
pub struct Report {
    /// The single results, in order.
    pub results: Vec<CaseResult>,
}

impl Report {
    /// Returns whether no case failed unexpectedly and every expected failure occurred.
    #[must_use]
    pub fn ok(&self) -> bool {
        !self
            .results
            .iter()
            .any(|r| matches!(r.status, Status::Failed(_) | Status::UnexpectedPass(_)))
    }

    /// The numbers of the cases that failed in any variant, expected or not, in order and once
    /// each.
    #[must_use]
    pub fn failed(&self) -> Vec<u16> {
        self.numbers(|s| matches!(s, Status::Failed(_) | Status::ExpectedFailure(_)))
    }

    /// The numbers of the cases that passed in any variant.
    #[must_use]
    pub fn passed(&self) -> Vec<u16> {
        self.numbers(|s| matches!(s, Status::Passed | Status::UnexpectedPass(_)))
    }

    /// The number of skipped runs.
    #[must_use]
    pub fn skipped(&self) -> usize {
        self.results.iter().filter(|r| matches!(r.status, Status::Skipped(_))).count()
    }

    fn numbers(&self, which: impl Fn(&Status) -> bool) -> Vec<u16> {
        let mut numbers: Vec<u16> =
            self.results.iter().filter(|r| which(&r.status)).map(|r| r.case).collect();
        numbers.sort_unstable();
        numbers.dedup();
        numbers
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for r in &self.results {
            let (word, why) = match &r.status {
                Status::Passed => ("ok", ""),
                Status::Failed(why) => ("FAILED", why.as_str()),
                Status::Skipped(why) => ("skipped", why.as_str()),
                Status::ExpectedFailure(why) => ("fails as expected", why.as_str()),
                Status::UnexpectedPass(why) => ("PASSED UNEXPECTEDLY", why.as_str()),
            };
            write!(
                f,
                "{:>3} {} [{}, {}] {word} ({:.1} ms)",
                r.case, r.name, r.tier, r.variant, r.ms
            )?;
            writeln!(f, "{}{}", if why.is_empty() { "" } else { ": " }, why)?;
        }
        let count =
            |which: fn(&Status) -> bool| self.results.iter().filter(|r| which(&r.status)).count();
        writeln!(
            f,
            "{} runs: {} passed, {} failed, {} skipped, {} failed as expected, {} passed unexpectedly",
            self.results.len(),
            count(|s| matches!(s, Status::Passed)),
            count(|s| matches!(s, Status::Failed(_))),
            self.skipped(),
            count(|s| matches!(s, Status::ExpectedFailure(_))),
            count(|s| matches!(s, Status::UnexpectedPass(_))),
        )
    }
}
