//! The key and value caches of a layer, as operators hold them.

use crate::kernels::cpu::cache::CacheLayout;
use crate::ops::Heads;
use crate::part::BufferPart;
use crate::tensor::DType;
use leasehold::{Error, Growing, Result, View};

/// The key and value caches of a layer, of one sequence or of several.
#[derive(Debug, Clone)]
pub struct Cache {
    /// Keys; values too where the memory grows.
    pub(crate) keys: BufferPart,
    pub(crate) values: Option<BufferPart>,
    pub(crate) limits: Option<BufferPart>,
    pub(crate) dtype: DType,
    pub(crate) layout: CacheLayout,
}

impl Cache {
    /// Caches `[kv_head][position][head_dim]` of keys and of values, or such caches of several
    /// sequences, one behind the other.
    #[must_use]
    pub fn contiguous(heads: Heads, keys: BufferPart, values: BufferPart, dtype: DType) -> Self {
        let layout = CacheLayout::contiguous(heads.kv_heads, heads.positions);
        Self { keys, values: Some(values), limits: None, dtype, layout }
    }

    /// Caches in memory that grows by positions. A part has the keys of some layers, and another
    /// part their values: `[position][layer][kv_head][head_dim]`. The layout says which parts, and
    /// which place in them.
    ///
    /// # Errors
    /// `InvalidArgument` for parts that are no whole number of heads, and for a layout with another
    /// distance between parts than theirs.
    pub fn growing(
        heads: Heads,
        parts: &Growing<u8>,
        layout: CacheLayout,
        dtype: DType,
    ) -> Result<Self> {
        let head = u64::from(heads.head_dim) * dtype.bytes() as u64;
        if u64::from(layout.part) * head != parts.most() as u64 {
            return Err(Error::invalid(format!(
                "parts of {} bytes for a layout of {} heads of {head} bytes a part; give both one size",
                parts.most(),
                layout.part
            )));
        }
        let limits = u32::try_from(parts.count()).map_err(|_| {
            Error::invalid(format!("{} growing parts; there are fewer than 2^32", parts.count()))
        })?;
        Ok(Self {
            keys: parts.clone().into(),
            values: None,
            limits: Some(parts.limit().view().into()),
            dtype,
            layout: CacheLayout { limits, ..layout },
        })
    }

    /// The caches of sequence `at` of the `of` sequences.
    ///
    /// # Errors
    /// `InvalidArgument` if there is no such sequence.
    pub fn sequence(&self, at: u32, of: u32) -> Result<Self> {
        if at >= of {
            return Err(Error::invalid(format!("sequence {at} of {of}, counted from 0")));
        }
        let Some(values) = &self.values else {
            let first = |part: u32| part.saturating_add(at.saturating_mul(self.layout.next));
            let layout = CacheLayout {
                keys: first(self.layout.keys),
                values: first(self.layout.values),
                ..self.layout
            };
            return Ok(Self { layout, ..self.clone() });
        };
        let share = |part: &BufferPart| {
            let bytes = part.view().len() / u64::from(of);
            part.slice(u64::from(at) * bytes, bytes)
        };
        Ok(Self { keys: share(&self.keys)?, values: Some(share(values)?), ..self.clone() })
    }

    /// The memory of the keys; also of the values, if the memory grows.
    #[must_use]
    pub fn keys(&self) -> &BufferPart {
        &self.keys
    }

    /// The memory of the values, unless it is that of the keys.
    #[must_use]
    pub fn values(&self) -> Option<&BufferPart> {
        self.values.as_ref()
    }
}
