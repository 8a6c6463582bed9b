//! Rules that keep tokens back, beside the sampling: a repetition penalty, tokens that never come,
//! and tokens that do not come first.

use leasehold::{Error, Result};

/// The rules for the tokens of a sequence; none by default. The fields have their names from
/// `generation_config.json`.
///
/// They change the logits on the device, before a [`Sampling`](crate::Sampling) draws from them,
/// as in Hugging Face's transformers. So [`Batch::logits`](crate::Batch::logits) and its like give
/// changed ones.
///
/// ```
/// use leasehold_llama::TokenRules;
/// let rules = TokenRules { repetition_penalty: 1.1, ..TokenRules::default() };
/// assert!(rules.suppress_tokens.is_empty());
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct TokenRules {
    /// Divides the logits above zero of the tokens in the prompt and in the text so far, and
    /// multiplies their other logits. Above 0; 1 changes nothing.
    pub repetition_penalty: f32,
    /// Tokens that never come: they get the lowest finite logit. Those outside the vocabulary count
    /// for nothing.
    pub suppress_tokens: Vec<u32>,
    /// Tokens that do not come as the first of a text.
    pub begin_suppress_tokens: Vec<u32>,
}

impl Default for TokenRules {
    fn default() -> Self {
        Self {
            repetition_penalty: 1.0,
            suppress_tokens: Vec::new(),
            begin_suppress_tokens: Vec::new(),
        }
    }
}

impl TokenRules {
    /// Returns whether these change nothing, after a check of the penalty.
    ///
    /// # Errors
    /// `InvalidArgument` for a penalty that is not above 0, or not finite.
    pub(crate) fn is_nothing(&self) -> Result<bool> {
        let penalty = self.repetition_penalty;
        if !(penalty > 0.0 && penalty.is_finite()) {
            return Err(Error::invalid(format!(
                "repetition_penalty is {penalty}; give a number above 0, which is finite"
            )));
        }
        let lists = [&self.suppress_tokens, &self.begin_suppress_tokens];
        Ok(penalty == 1.0 && lists.iter().all(|list| list.is_empty()))
    }

    /// The tokens that count as seen after a prompt, as bits.
    pub(crate) fn seen(&self, prompt: &[u32], vocabulary: u32) -> Vec<u32> {
        let counted = if self.repetition_penalty == 1.0 { &[] } else { prompt };
        bits(counted, vocabulary)
    }

    /// The tokens that are kept back at the `first` token of a text, or at later ones, as bits.
    pub(crate) fn banned(&self, first: bool, vocabulary: u32) -> Vec<u32> {
        let begin = if first { &self.begin_suppress_tokens[..] } else { &[] };
        bits(self.suppress_tokens.iter().chain(begin), vocabulary)
    }
}

/// A bit for each token of a vocabulary.
fn bits<'a>(ids: impl IntoIterator<Item = &'a u32>, vocabulary: u32) -> Vec<u32> {
    let mut words = vec![0; vocabulary.div_ceil(32) as usize];
    for id in ids.into_iter().filter(|&&id| id < vocabulary) {
        words[(id / 32) as usize] |= 1 << (id % 32);
    }
    words
}
