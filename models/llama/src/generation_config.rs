//! `generation_config.json`: the tokens that end a text, and how its makers choose tokens.

use std::path::Path;

use leasehold::{Error, Result};
use leasehold_operators::ops::Sampling;
use serde_json::{Map, Value};

use crate::fields::{Fields, brief, object};
use crate::{TokenRules, files};

/// The maximum size of the file in bytes; real files have a few hundred.
const MAX_BYTES: u64 = 16 << 20;
/// transformers' number of candidates if the file has none.
const DEFAULT_TOP_K: u32 = 50;
/// Settings that change no token of a text: ids that another key uses, lengths (which the caller
/// says), caches, what is returned beside the text, how drafts are made, and settings of beams.
const NOTHING: [&str; 38] = [
    "transformers_version",
    "bos_token_id",
    "pad_token_id",
    "decoder_start_token_id",
    "max_length",
    "max_new_tokens",
    "use_cache",
    "cache_implementation",
    "cache_config",
    "return_legacy_cache",
    "prefill_chunk_size",
    "return_dict_in_generate",
    "output_attentions",
    "output_hidden_states",
    "output_scores",
    "output_logits",
    "renormalize_logits",
    "remove_invalid_values",
    "low_memory",
    "disable_compile",
    "compile_config",
    "is_assistant",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "assistant_confidence_threshold",
    "assistant_early_exit",
    "assistant_lookbehind",
    "target_lookbehind",
    "prompt_lookup_num_tokens",
    "max_matching_ngram_size",
    "early_stopping",
    "length_penalty",
    "num_beam_groups",
    "diversity_penalty",
    "chat_format",
    "max_window_size",
    "trust_remote_code",
    "torch_dtype",
];
/// Settings that are computed: [`GenerationConfig::eos_token_ids`], [`GenerationConfig::sampling`],
/// [`GenerationConfig::rules`].
const COMPUTED: [&str; 9] = [
    "eos_token_id",
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "suppress_tokens",
    "begin_suppress_tokens",
];
/// Settings that are not computed, with the value that changes nothing. All other settings but
/// these and those above are refused.
const NEUTRAL: [(&str, f64); 10] = [
    ("encoder_repetition_penalty", 1.0),
    ("no_repeat_ngram_size", 0.0),
    ("encoder_no_repeat_ngram_size", 0.0),
    ("num_beams", 1.0),
    ("num_return_sequences", 1.0),
    ("min_length", 0.0),
    ("min_new_tokens", 0.0),
    ("guidance_scale", 1.0),
    ("penalty_alpha", 0.0),
    ("token_healing", 0.0),
];
/// The same, of which greedy choices take no notice.
const SAMPLED: [(&str, f64); 4] =
    [("typical_p", 1.0), ("epsilon_cutoff", 0.0), ("eta_cutoff", 0.0), ("top_h", 1.0)];

/// The settings of a model's `generation_config.json`.
///
/// ```
/// use leasehold_llama::GenerationConfig;
/// let json = br#"{"eos_token_id": [2, 286], "do_sample": true, "temperature": 0.6, "top_k": 20}"#;
/// let config = GenerationConfig::from_slice(json, "generation_config.json")?;
/// assert_eq!(config.eos_token_ids(), Some(&[2, 286][..]));
/// assert_eq!(config.sampling()?.top_k, 20);
/// # Ok::<(), leasehold::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct GenerationConfig {
    map: Map<String, Value>,
    origin: String,
    eos_token_ids: Option<Vec<u32>>,
}

impl GenerationConfig {
    /// Reads `DIR/generation_config.json`; `None` without that file. Blocks on the file.
    ///
    /// # Errors
    /// `NotFound` for a file that cannot be read. `InvalidArgument` for a file that is not regular
    /// or has more than 16 MiB. Otherwise as [`from_slice`](Self::from_slice).
    pub fn from_dir(dir: &Path) -> Result<Option<Self>> {
        let path = dir.join("generation_config.json");
        if path.symlink_metadata().is_err() {
            return Ok(None);
        }
        let bytes = files::read(&path, MAX_BYTES)?;
        Self::from_slice(&bytes, &path.display().to_string()).map(Some)
    }

    /// Reads the text of a `generation_config.json`; `origin` names the file in messages.
    ///
    /// # Errors
    /// `InvalidArgument` for a text that is no JSON object, or end tokens that are no token ids.
    pub fn from_slice(json: &[u8], origin: &str) -> Result<Self> {
        let map = object(json, origin)?;
        let fields = Fields { map: &map, origin, prefix: "" };
        let eos_token_ids = fields.get("eos_token_id").map(|_| fields.ids("eos_token_id"));
        let eos_token_ids = eos_token_ids.transpose()?;
        Ok(Self { map, origin: origin.to_owned(), eos_token_ids })
    }

    /// The tokens that end a text, which replace those of `config.json`; `None` without them.
    #[must_use]
    pub fn eos_token_ids(&self) -> Option<&[u32]> {
        self.eos_token_ids.as_deref()
    }

    /// The choice of tokens, with seed 0 and transformers' defaults for absent keys. Greedy without
    /// `do_sample`.
    ///
    /// # Errors
    /// `InvalidArgument` for a key that is no number or out of range. `Unsupported` for a setting
    /// that is not computed here and may change the text, by name. That is each one that this
    /// version does not know, unless it is `null` or an empty list.
    pub fn sampling(&self) -> Result<Sampling> {
        let fields = self.fields();
        let sampled = fields.flag("do_sample")?;
        for key in self.map.keys() {
            let off = |value: &&Value| {
                !matches!(value, Value::Array(list) if list.is_empty())
                    && !matches!(value, Value::Object(map) if map.is_empty())
            };
            let known = NOTHING.iter().chain(&COMPUTED).any(|known| known == key);
            let Some(value) = fields.get(key).filter(off) else { continue };
            let ignored = !sampled && SAMPLED.iter().any(|(name, _)| name == key);
            // Names of this form are notes about the file.
            if known || ignored || key.starts_with('_') {
                continue;
            }
            let neutral = NEUTRAL.iter().chain(&SAMPLED).find(|(name, _)| name == key);
            let number = value.as_f64().or(value.as_bool().map(|flag| f64::from(u8::from(flag))));
            match (neutral, number) {
                (Some((_, nothing)), Some(number)) if number == *nothing => {}
                (Some((_, nothing)), _) => {
                    return Err(fields.unsupported(key, brief(value), &nothing.to_string()));
                }
                (None, _) => return Err(fields.unsupported(key, brief(value), "null")),
            }
        }
        if !sampled {
            return Ok(Sampling::default());
        }
        let temperature = fields.optional_positive("temperature")?.unwrap_or(1.0) as f32;
        let top_k = match fields.optional_number("top_k")? {
            Some(0.0) => 0,
            _ => fields
                .optional_dim("top_k", u64::from(u32::MAX))?
                .map_or(DEFAULT_TOP_K, |k| k as u32),
        };
        let number = |key, nothing: f32| -> Result<f32> {
            Ok(fields.optional_number(key)?.map_or(nothing, |value| value as f32))
        };
        let none = Sampling::default();
        let (top_p, min_p) = (number("top_p", none.top_p)?, number("min_p", none.min_p)?);
        let sampling = Sampling { temperature, top_k, top_p, min_p, ..none };
        match sampling.record() {
            Err(Error::InvalidArgument(why)) => {
                Err(Error::invalid(format!("{}: {why}", self.origin)))
            }
            record => record.map(|_| sampling),
        }
    }

    fn fields(&self) -> Fields<'_> {
        Fields { map: &self.map, origin: &self.origin, prefix: "" }
    }

    /// The rules that keep tokens back; without a rule for absent keys. They count for greedy
    /// choices too.
    ///
    /// # Errors
    /// `InvalidArgument` for a penalty that is not above zero, and for tokens that are no ids.
    pub fn rules(&self) -> Result<TokenRules> {
        let fields = self.fields();
        Ok(TokenRules {
            repetition_penalty: fields.optional_positive("repetition_penalty")?.unwrap_or(1.0)
                as f32,
            suppress_tokens: fields.ids("suppress_tokens")?,
            begin_suppress_tokens: fields.ids("begin_suppress_tokens")?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(json: &str) -> Result<GenerationConfig> {
        GenerationConfig::from_slice(json.as_bytes(), "dir/generation_config.json")
    }

    #[test]
    fn end_tokens_are_one_or_many_or_none() {
        for (json, wanted) in [
            (r#"{"eos_token_id": 7}"#, Some(&[7][..])),
            (r#"{"eos_token_id": [7.0, 9]}"#, Some(&[7, 9])),
            (r#"{"eos_token_id": null}"#, None),
            (r#"{"temperature": NaN}"#, None),
        ] {
            assert_eq!(read(json).unwrap().eos_token_ids(), wanted, "{json}");
        }
    }

    #[test]
    fn sampling_is_transformers_and_greedy_without_do_sample() {
        let sampling = |json| read(json).unwrap().sampling().unwrap();
        assert_eq!(
            sampling(r#"{"temperature": 0.5, "top_k": 3, "top_p": 0.9}"#),
            Sampling::default()
        );
        let all = sampling(
            r#"{"do_sample": true, "temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1}"#,
        );
        assert_eq!((all.temperature, all.top_k, all.top_p, all.min_p), (0.5, 3, 0.9, 0.1));
        let none = sampling(r#"{"do_sample": true}"#);
        assert_eq!((none.temperature, none.top_k, none.top_p, none.min_p), (1.0, 50, 1.0, 0.0));
        assert_eq!(sampling(r#"{"do_sample": true, "top_k": 0}"#).top_k, 0);
    }

    #[test]
    fn every_error_names_file_and_key() {
        for (json, words) in [
            ("{\"eos_token_id\":", "no valid JSON"),
            ("[1]", "a JSON object is expected"),
            (r#"{"eos_token_id": 2.5}"#, "eos_token_id: a token id"),
        ] {
            let error = read(json).unwrap_err().to_string();
            assert!(error.contains("generation_config.json: ") && error.contains(words), "{error}");
        }
        for (json, words) in [
            (r#"{"do_sample": true, "typical_p": 0.9}"#, "typical_p: 0.9; supported: 1"),
            (r#"{"do_sample": true, "top_p": 1.5}"#, "top_p is 1.5; give a number above 0"),
            (r#"{"do_sample": true, "top_p": 0}"#, "top_p is 0; give a number above 0"),
            (r#"{"do_sample": true, "min_p": -1}"#, "min_p is -1; give a number from 0 to 1"),
            (r#"{"do_sample": true, "min_p": "a"}"#, "min_p: a number is expected"),
            (r#"{"do_sample": true, "temperature": NaN}"#, "temperature: a number is expected"),
            (r#"{"do_sample": true, "temperature": 0}"#, "temperature: 0 is not above zero"),
            (r#"{"do_sample": true, "top_k": -1}"#, "top_k: -1 is not between"),
            (r#"{"do_sample": 1}"#, "do_sample: true or false"),
            (r#"{"num_beams": 4}"#, "num_beams: 4; supported: 1"),
            (r#"{"token_healing": true}"#, "token_healing: true; supported: 0"),
            (r#"{"bad_words_ids": [[12]]}"#, "bad_words_ids: [[12]]; supported: null"),
            (r#"{"sequence_bias": {"a": 1}}"#, "sequence_bias: an object; supported"),
            (r#"{"forced_eos_token_id": 2}"#, "forced_eos_token_id: 2; supported"),
            (r#"{"a_new_setting": 0}"#, "a_new_setting: 0; supported"),
            (r#"{"repetition_penalty": 0}"#, "repetition_penalty: 0 is not above zero"),
            (r#"{"suppress_tokens": [-1]}"#, "suppress_tokens: a token id or a list of them"),
            (r#"{"begin_suppress_tokens": "a"}"#, "begin_suppress_tokens: a token id"),
        ] {
            let read = read(json).unwrap();
            let error = read.sampling().err().or(read.rules().err()).unwrap().to_string();
            assert!(error.contains("generation_config.json: ") && error.contains(words), "{error}");
        }
    }

    #[test]
    fn settings_that_change_nothing_are_no_errors() {
        let config = read(
            r#"{"_from_model_config": true, "transformers_version": "5.2.0", "max_new_tokens": 9,
                "bos_token_id": 1, "pad_token_id": 0, "eos_token_id": [2], "use_cache": false,
                "num_beams": 1, "num_return_sequences": 1.0, "no_repeat_ngram_size": 0,
                "token_healing": false, "bad_words_ids": null, "sequence_bias": {},
                "forced_decoder_ids": [], "typical_p": 0.4, "output_scores": true}"#,
        );
        assert_eq!(config.as_ref().unwrap().sampling().unwrap(), Sampling::default());
        assert_eq!(config.unwrap().rules().unwrap(), TokenRules::default());
    }

    #[test]
    fn rules_are_read_with_and_without_do_sample() {
        for sampled in ["true", "false"] {
            let json = format!(
                r#"{{"do_sample": {sampled}, "repetition_penalty": 1.05, "suppress_tokens": [7],
                     "begin_suppress_tokens": [220, 50256]}}"#
            );
            let config = read(&json).unwrap();
            config.sampling().unwrap();
            let wanted = TokenRules {
                repetition_penalty: 1.05,
                suppress_tokens: vec![7],
                begin_suppress_tokens: vec![220, 50256],
            };
            assert_eq!(config.rules().unwrap(), wanted);
        }
    }

    #[test]
    fn a_directory_may_have_none() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(GenerationConfig::from_dir(dir.path()).unwrap(), None);
        let path = dir.path().join("generation_config.json");
        std::fs::write(&path, "{\"eos_token_id\": 3}").unwrap();
        let read = GenerationConfig::from_dir(dir.path()).unwrap().unwrap();
        assert_eq!(read.eos_token_ids(), Some(&[3][..]));
        std::fs::remove_file(&path).unwrap();
        std::fs::create_dir(&path).unwrap();
        let error = GenerationConfig::from_dir(dir.path()).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument(_)), "{error}");
    }
}
