//! The selection of cases, and the limits of a run.
//!
//! This module must not know which code runs the cases.

use crate::case::{Case, Tag, Tier};
use crate::isolate::Isolation;
use crate::variant::Wrap;
use leasehold::DeviceId;
use std::time::Duration;

/// The selection of cases, and the limits of a run.
#[derive(Debug, Clone)]
pub struct Filter {
    /// Cases by number; empty selects all.
    /// Default: empty.
    pub numbers: Vec<u16>,
    /// Only cases of this tier.
    /// Default: `None`, all tiers.
    pub tier: Option<Tier>,
    /// Only cases with this tag.
    /// Default: `None`, all cases.
    pub tag: Option<Tag>,
    /// Only this wrapper.
    /// Default: `None`, all wrappers.
    pub wrap: Option<Wrap>,
    /// The device to open; by default the backend's first one.
    pub device: Option<DeviceId>,
    /// The time limit of a single wait.
    /// Default: 10 seconds.
    pub timeout: Duration,
    /// The time limit of a case.
    /// Default: 60 seconds.
    pub limit: Duration,
    /// Runs repetitions in full; otherwise a tenth of them.
    /// Default: `false`.
    pub thorough: bool,
    /// The way to start other processes, for cases that need one. Without it they run in this
    /// process.
    /// Default: `None`.
    pub isolation: Option<Isolation>,
}

impl Default for Filter {
    fn default() -> Self {
        Self {
            numbers: Vec::new(),
            tier: None,
            tag: None,
            wrap: None,
            device: None,
            timeout: Duration::from_secs(10),
            limit: Duration::from_secs(60),
            thorough: false,
            isolation: None,
        }
    }
}

impl Filter {
    /// A filter for some cases only.
    #[must_use]
    pub fn only(numbers: &[u16]) -> Self {
        Self { numbers: numbers.to_vec(), ..Self::default() }
    }

    pub(crate) fn takes(&self, case: &Case) -> bool {
        (self.numbers.is_empty() || self.numbers.contains(&case.number))
            && self.tier.is_none_or(|t| t == case.tier)
            && self.tag.is_none_or(|t| case.tags.contains(&t))
    }
}
