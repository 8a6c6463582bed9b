//! From logits to the next token.
//!
//! This module must not know a model.

use super::{check, part, shape, some};
use crate::kernels::cpu::sampling::{AdvanceParams, NextTokenParams, RowParams};
use crate::library::Library;
use crate::operator::Operator;
use crate::part::BufferPart;
use crate::tensor::{DType, Tensor};
use leasehold::{Result, View};

/// Softmax, row by row. A row with a NaN or +∞, or of −∞ only, is all NaN.
///
/// # Errors
/// `InvalidArgument` for shapes that do not match.
pub fn softmax(library: &Library, x: &Tensor, y: &Tensor) -> Result<Operator> {
    check(x.rows() == y.rows() && x.cols() == y.cols(), || {
        format!("softmax: x {}, y {}; give both one shape", shape(x), shape(y))
    })?;
    let params = RowParams {
        rows: x.rows(),
        n: x.cols(),
        ldx: x.ld(),
        ldy: y.ld(),
        x: x.dtype() as u32,
        y: y.dtype() as u32,
    };
    Operator::new(library, "softmax", &params, &[some(x), some(y)])
}

/// The index of the largest element of each row, as i32. Of equal elements the first; −1 if all
/// are NaN.
///
/// # Errors
/// `InvalidArgument` if `ids` is too short.
pub fn argmax(library: &Library, x: &Tensor, ids: &BufferPart) -> Result<Operator> {
    let params =
        RowParams { rows: x.rows(), n: x.cols(), ldx: x.ld(), ldy: 0, x: x.dtype() as u32, y: 0 };
    Operator::new(library, "argmax", &params, &[some(x), part(ids)])
}

pub use crate::kernels::cpu::sampling::{LogProbabilities, MAX_LOG_PROBABILITIES, SamplingRecord};

/// The rule that chooses the next token of a sequence; greedy by default.
///
/// The candidates are cut in the order of the fields, as in Hugging Face's transformers.
///
/// ```
/// use leasehold_operators::ops::Sampling;
/// let sampling = Sampling { temperature: 0.6, top_k: 20, top_p: 0.95, ..Sampling::default() };
/// assert_eq!(sampling.record()?.top_k, 20);
/// let error = Sampling { top_p: 1.5, ..sampling }.record().unwrap_err().to_string();
/// assert!(error.contains("top_p"));
/// # Ok::<(), leasehold::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampling {
    /// The divisor of the logits, finite; 0 selects the largest logit, the first of equal ones.
    pub temperature: f32,
    /// The number of largest logits that are candidates, of equal logits the first ones; 0 for all.
    pub top_k: u32,
    /// Leaves the smallest number of the most probable candidates, of equal ones the first, whose
    /// probabilities reach this sum. Above 0, and at most 1, which leaves all.
    pub top_p: f32,
    /// Leaves the candidates that have at least this part of the largest probability, from 0 to 1;
    /// 0 leaves all.
    pub min_p: f32,
    /// The seed. The same seed, position and logits give the same token. So sequences of one
    /// prompt need [seeds of their own](Self::of_sequence) to differ.
    pub seed: u64,
    /// The number of largest logits whose log-probabilities a step writes, beside the token's: at
    /// most [`MAX_LOG_PROBABILITIES`]; 0 for none, the token's neither.
    pub log_probabilities: u32,
}

impl Default for Sampling {
    fn default() -> Self {
        Self { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed: 0, log_probabilities: 0 }
    }
}

impl Sampling {
    /// The rule for sequence `number` of several that have one seed. Each has a seed of its own,
    /// made from that one and the number. Sequence 0 has the seed itself.
    ///
    /// ```
    /// use leasehold_operators::ops::Sampling;
    /// let all = Sampling { temperature: 1.0, seed: 7, ..Sampling::default() };
    /// assert_eq!(all.of_sequence(0), all);
    /// assert_ne!(all.of_sequence(1).seed, all.of_sequence(2).seed);
    /// ```
    #[must_use]
    pub fn of_sequence(self, number: u64) -> Self {
        // Odd, so no two numbers give one seed.
        let step = 0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(number);
        Self { seed: self.seed.wrapping_add(step), ..self }
    }

    /// The words of a row for [`next_token`].
    ///
    /// # Errors
    /// `InvalidArgument` for a field beyond its limits, and for one that is no number.
    pub fn record(&self) -> Result<SamplingRecord> {
        let Self { temperature, top_k, top_p, min_p, seed, log_probabilities } = *self;
        let number = |ok: bool, name: &str, value: f32, limits: &str| {
            check(ok, || format!("{name} is {value}; give a number {limits}"))
        };
        let warm = temperature >= 0.0 && temperature.is_finite();
        number(warm, "temperature", temperature, "from 0 up, which is finite")?;
        number(top_p > 0.0 && top_p <= 1.0, "top_p", top_p, "above 0 and at most 1")?;
        number((0.0..=1.0).contains(&min_p), "min_p", min_p, "from 0 to 1")?;
        check(log_probabilities as usize <= MAX_LOG_PROBABILITIES, || {
            format!(
                "log_probabilities is {log_probabilities}; give {MAX_LOG_PROBABILITIES} at most"
            )
        })?;
        let seed = [seed as u32, (seed >> 32) as u32];
        Ok(SamplingRecord {
            temperature,
            top_k,
            top_p,
            min_p,
            seed,
            log_probabilities,
            reserved: 0,
        })
    }
}

/// The state of decode loops in device memory: a row for each sequence.
///
/// A row whose position is negative is idle: [`next_token`] and [`advance`] leave it as it is.
#[derive(Debug, Clone)]
pub struct Loop {
    /// The input token of the next step: an i32 for each row.
    pub token: BufferPart,
    /// Its position: an i32 for each row.
    pub position: BufferPart,
    /// The drawn tokens, in a ring of i32 for each row, one behind the other.
    pub ring: BufferPart,
    /// The number of drawn tokens: a u32 for each row.
    pub count: BufferPart,
}

impl Loop {
    /// The number of rows.
    fn rows(&self) -> u32 {
        u32::try_from(self.token.view().len() / 4).unwrap_or(u32::MAX)
    }

    /// The ids of a row's ring.
    fn ring_len(&self) -> u32 {
        entries(&self.ring, 4, self.rows())
    }
}

/// The number of entries of `bytes` bytes that each of `rows` rows has in a part.
fn entries(part: &BufferPart, bytes: u64, rows: u32) -> u32 {
    u32::try_from(part.view().len() / bytes / u64::from(rows.max(1))).unwrap_or(u32::MAX)
}

/// For each row: `position += step`; the token goes to the ring; the count grows by one.
///
/// # Errors
/// `InvalidArgument` for a state without rows, or one whose parts have fewer rows than tokens.
pub fn advance(library: &Library, state: &Loop, step: u32) -> Result<Operator> {
    let params = AdvanceParams { rows: state.rows(), step, ring: state.ring_len() };
    let operands =
        [part(&state.token), part(&state.position), part(&state.ring), part(&state.count)];
    Operator::new(library, "advance", &params, &operands)
}

/// The sets and the factor by which [`penalise`] changes the logits of sequences: a row for each.
#[derive(Debug, Clone)]
pub struct Penalties {
    /// An f32 for each row: logits above zero of the tokens that were seen are divided by it, and
    /// others multiplied. No change unless it is positive and finite.
    pub factor: BufferPart,
    /// The tokens that were seen: a bit for each token, in as many words for each row as it takes.
    pub seen: BufferPart,
    /// The tokens that are never drawn, in the same form.
    pub banned: BufferPart,
}

/// Changes f32 logits before [`next_token`] draws from them, as a repetition penalty and a list of
/// suppressed tokens say. The tokens of `state` join those that were seen. A banned token has the
/// lowest finite logit then. A token outside the vocabulary joins nothing.
///
/// # Errors
/// `InvalidArgument` for logits that are not f32, for another number of rows in the state, and for
/// a part that is too short for the rows.
pub fn penalise(
    library: &Library,
    logits: &Tensor,
    state: &Loop,
    penalties: &Penalties,
) -> Result<Operator> {
    let rows = logits.rows();
    check(logits.dtype() == DType::F32 && state.rows() == rows, || {
        format!(
            "penalise: logits {}, {} tokens; give logits of F32, and a token for each row",
            shape(logits),
            state.rows()
        )
    })?;
    let (n, ldx, x) = (logits.cols(), logits.ld(), logits.dtype() as u32);
    let params = RowParams { rows, n, ldx, ldy: 0, x, y: 0 };
    let Penalties { factor, seen, banned } = penalties;
    let (token, position) = (part(&state.token), part(&state.position));
    let operands = [some(logits), part(factor), token, position, part(seen), part(banned)];
    Operator::new(library, "penalise", &params, &operands)
}

/// Draws the next token of each row of f32 logits, and advances the row by one. This is the end of
/// a decode step: one launch for all sequences.
///
/// `sampling` has a [`SamplingRecord`] for each row. They are data: another record needs no other
/// operator, and no other recording. Any words are taken; [`SamplingRecord`] says what they mean. A
/// NaN is not a candidate; the token is −1 if all logits are NaN. The position is the counter of
/// the random numbers.
///
/// `log_probabilities` has a ring of [`LogProbabilities`] for each row, one behind the other. A row
/// whose record asks for some writes entry `count mod size`, with the count before the step. So
/// their place is the token's, if both rings have one size. A row that asks for none makes no pass
/// over its logits for them, and leaves its ring as it is. The same is true of all rows without a
/// ring.
///
/// # Errors
/// `InvalidArgument` for logits that are not f32, for another number of rows in the state, and for
/// a part that is too short for the rows.
pub fn next_token(
    library: &Library,
    logits: &Tensor,
    sampling: &BufferPart,
    state: &Loop,
    log_probabilities: Option<&BufferPart>,
) -> Result<Operator> {
    let rows = logits.rows();
    check(logits.dtype() == DType::F32 && state.rows() == rows, || {
        format!(
            "next_token: logits {}, {} tokens; give logits of F32, and a token for each row",
            shape(logits),
            state.rows()
        )
    })?;
    let params = NextTokenParams {
        rows,
        n: logits.cols(),
        ld: logits.ld(),
        ring: state.ring_len(),
        log_ring: log_probabilities
            .map_or(0, |logs| entries(logs, size_of::<LogProbabilities>() as u64, rows)),
    };
    let operands = [
        some(logits),
        part(sampling),
        part(&state.token),
        part(&state.position),
        part(&state.ring),
        part(&state.count),
        log_probabilities.and_then(part),
    ];
    Operator::new(library, "next_token", &params, &operands)
}
