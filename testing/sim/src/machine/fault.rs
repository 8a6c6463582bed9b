//! Fault injection: the rules by which calls fail on demand.
//!
//! Each entry of the machine has a name. A vendor's layer above names its own calls through
//! [`Machine::note`](super::Machine::note). Calls are counted from 0, all together and by name. So
//! a test can run once, ask for the number of calls, and fail each call in another run.
//!
//! This module must not know what the calls do.

use super::rng::Rng;
use leasehold_core::{Error, OutOfMemory};
use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

/// The effect of a fault.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum FaultAction {
    /// The call fails with `OutOfMemory`.
    OutOfMemory,
    /// The call fails with `Error::Driver` of this code.
    Fail(i32),
    /// The call's device is lost permanently; the call fails with `DeviceLost`.
    DeviceLost,
    /// The next enqueued command becomes ready only after this many steps of the machine.
    Delay(u32),
    /// The next enqueued command runs only when nothing else can run: every other queue overtakes
    /// it.
    Reorder,
    /// Like `Delay`, for the next enqueued host function.
    LateCallback(u32),
    /// The next node of a graph comes after none, whatever dependencies it is given.
    Unordered,
    /// The call does not return until [`Monitor::end_hangs`](super::Monitor::end_hangs). Then it
    /// fails.
    Hang,
}

/// The calls at which a fault occurs.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum When {
    /// At one call, once.
    At(u64),
    /// At every call from this one on.
    From(u64),
    /// At every call.
    Always,
    /// At each call with this probability.
    Probability(f64),
    /// At the next call; then the rule is removed.
    Once,
}

/// A rule of a plan. Indices count the calls of the rule's name, or all calls if it has none.
#[derive(Debug, Clone, PartialEq)]
pub struct FaultRule {
    /// The call; every call when `None`.
    pub call: Option<String>,
    /// The calls at which the fault occurs.
    pub when: When,
    /// The effect.
    pub action: FaultAction,
}

impl FaultRule {
    /// A rule for the call of this name.
    #[must_use]
    pub fn on(call: &str, when: When, action: FaultAction) -> Self {
        Self { call: Some(call.to_owned()), when, action }
    }

    /// A rule for every call.
    #[must_use]
    pub fn any(when: When, action: FaultAction) -> Self {
        Self { call: None, when, action }
    }
}

/// The faults of a machine. The first rule that applies wins.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct FaultPlan {
    /// The rules.
    pub rules: Vec<FaultRule>,
}

impl FaultPlan {
    /// A plan without faults.
    #[must_use]
    pub fn none() -> Self {
        Self::default()
    }

    /// Adds a rule.
    #[must_use]
    pub fn with(mut self, rule: FaultRule) -> Self {
        self.rules.push(rule);
        self
    }
}

/// Rules as text, with commas between: `CALL@N=EFFECT` at the call of this number, counted from 0;
/// `CALL@N..=EFFECT` from it on; `CALL@P%=EFFECT` with a probability; `CALL=EFFECT` always. Effects
/// are `out-of-memory`, `device-lost`, `error:CODE` and `unordered`.
impl FromStr for FaultPlan {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let rule = |rule: &str| {
            let (place, effect) = rule.split_once('=')?;
            let action = match effect.trim() {
                "out-of-memory" => FaultAction::OutOfMemory,
                "device-lost" => FaultAction::DeviceLost,
                "unordered" => FaultAction::Unordered,
                other => FaultAction::Fail(other.strip_prefix("error:")?.parse().ok()?),
            };
            let (call, when) = match place.trim().split_once('@') {
                None => (place.trim(), When::Always),
                Some((call, at)) => {
                    let when = if let Some(percent) = at.strip_suffix('%') {
                        let share = percent.parse::<f64>().ok()? / 100.0;
                        When::Probability(Some(share).filter(|p| (0.0..=1.0).contains(p))?)
                    } else if let Some(from) = at.strip_suffix("..") {
                        When::From(from.parse().ok()?)
                    } else {
                        When::At(at.parse().ok()?)
                    };
                    (call, when)
                }
            };
            (!call.is_empty()).then(|| FaultRule::on(call, when, action))
        };
        let rules = text.split(',').map(str::trim).filter(|part| !part.is_empty()).map(|part| {
            rule(part).ok_or_else(|| {
                Error::invalid(format!(
                    "{part:?} is no fault; say CALL@N=EFFECT, such as cuMemCreate@2=out-of-memory; effects are out-of-memory, device-lost, error:CODE, unordered"
                ))
            })
        });
        Ok(Self { rules: rules.collect::<Result<_, _>>()? })
    }
}

/// The counts and the plan.
#[derive(Default)]
pub(crate) struct Faults {
    pub(crate) plan: FaultPlan,
    calls: u64,
    by_name: BTreeMap<Box<str>, u64>,
}

/// A requested effect other than an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Disturbance {
    Delay(u32),
    Reorder,
    LateCallback(u32),
    Unordered,
    Hang,
}

/// The outcome of a counted call.
pub(crate) enum CallOutcome {
    Pass,
    Disturb(Disturbance),
    Fail(Error),
    Lose(String),
}

impl Faults {
    pub(crate) fn new(plan: FaultPlan) -> Self {
        Self { plan, ..Self::default() }
    }

    /// Counts a call and returns its outcome.
    pub(crate) fn call(&mut self, name: &str, rng: &mut Rng) -> CallOutcome {
        let index = self.calls;
        self.calls += 1;
        let own = match self.by_name.get_mut(name) {
            Some(count) => {
                *count += 1;
                *count - 1
            }
            None => {
                self.by_name.insert(name.into(), 1);
                0
            }
        };
        for (i, rule) in self.plan.rules.iter().enumerate() {
            let at = match &rule.call {
                Some(call) if call == name => own,
                Some(_) => continue,
                None => index,
            };
            let applies = match rule.when {
                When::At(k) => at == k,
                When::From(k) => at >= k,
                When::Always => true,
                When::Probability(p) => rng.happens(p),
                When::Once => true,
            };
            if applies {
                let verdict = verdict(&rule.action, name, index);
                if rule.when == When::Once {
                    self.plan.rules.remove(i);
                }
                return verdict;
            }
        }
        CallOutcome::Pass
    }

    /// The number of calls so far.
    pub(crate) fn calls(&self) -> u64 {
        self.calls
    }

    /// The number of calls so far, by name.
    pub(crate) fn by_name(&self) -> Vec<(String, u64)> {
        self.by_name.iter().map(|(name, &n)| (name.to_string(), n)).collect()
    }
}

fn verdict(action: &FaultAction, name: &str, index: u64) -> CallOutcome {
    match *action {
        FaultAction::OutOfMemory => CallOutcome::Fail(
            OutOfMemory::new("the simulated device", 0)
                .note(format!("injected into call {index} ({name})"))
                .into(),
        ),
        FaultAction::Fail(code) => CallOutcome::Fail(Error::Driver {
            api: "sim",
            code,
            name: format!("injected into call {index} ({name})").into_boxed_str(),
        }),
        FaultAction::DeviceLost => {
            CallOutcome::Lose(format!("injected into call {index} ({name})"))
        }
        FaultAction::Delay(steps) => CallOutcome::Disturb(Disturbance::Delay(steps)),
        FaultAction::Reorder => CallOutcome::Disturb(Disturbance::Reorder),
        FaultAction::Unordered => CallOutcome::Disturb(Disturbance::Unordered),
        FaultAction::Hang => CallOutcome::Disturb(Disturbance::Hang),
        FaultAction::LateCallback(steps) => CallOutcome::Disturb(Disturbance::LateCallback(steps)),
    }
}

impl fmt::Debug for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Faults").field("calls", &self.calls).field("plan", &self.plan).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_is_read_from_a_text() {
        let plan: FaultPlan = "cuMemCreate@2=out-of-memory, cuLaunchKernel@7..=device-lost,cuEventQuery@25%=error:700,cuMemFree=error:1,a@0=unordered"
            .parse()
            .unwrap();
        let want = FaultPlan::none()
            .with(FaultRule::on("cuMemCreate", When::At(2), FaultAction::OutOfMemory))
            .with(FaultRule::on("cuLaunchKernel", When::From(7), FaultAction::DeviceLost))
            .with(FaultRule::on("cuEventQuery", When::Probability(0.25), FaultAction::Fail(700)))
            .with(FaultRule::on("cuMemFree", When::Always, FaultAction::Fail(1)))
            .with(FaultRule::on("a", When::At(0), FaultAction::Unordered));
        assert_eq!(plan, want);
        assert_eq!("".parse::<FaultPlan>().unwrap(), FaultPlan::none());
        for wrong in [
            "cuMemCreate",
            "=device-lost",
            "a@x=device-lost",
            "a@-1=device-lost",
            "a@101%=device-lost",
            "a=broken",
            "a=error:x",
        ] {
            let why = wrong.parse::<FaultPlan>().unwrap_err().to_string();
            assert!(why.contains(&format!("{wrong:?} is no fault")), "{why}");
        }
    }
}
