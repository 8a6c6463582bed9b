//! Launch rules of a kernel: a check by the kernel's author, the alignment of bindings, and the
//! bindings that may overlap.
//!
//! This module must not know when launches are checked.

use super::Binding;
use super::params::FromParams;
use leasehold_core::{Error, Result};
use std::fmt;
use std::sync::Arc;

/// The description of a launch for a kernel's check.
#[derive(Debug, Clone, Copy)]
pub struct LaunchInfo<'a> {
    /// Blocks in each direction; none is zero.
    pub grid: [u32; 3],
    /// Threads of a block in each direction.
    pub block: [u32; 3],
    /// Bytes of shared memory of a block.
    pub shared: u32,
    params: &'a [u8],
    bindings: &'a [Binding],
}

impl<'a> LaunchInfo<'a> {
    /// A launch of these blocks with these parameters and bindings.
    #[inline]
    #[must_use]
    pub fn new(
        (grid, block, shared): ([u32; 3], [u32; 3], u32),
        params: &'a [u8],
        bindings: &'a [Binding],
    ) -> Self {
        Self { grid, block, shared, params, bindings }
    }

    /// The parameters' bytes; their number is the one that the kernel declares.
    #[inline]
    #[must_use]
    pub fn params_bytes(&self) -> &'a [u8] {
        self.params
    }

    /// The parameters as a plain struct.
    ///
    /// # Errors
    /// `InvalidArgument` if the sizes differ.
    #[inline]
    pub fn params<T: FromParams>(&self) -> Result<T> {
        match bytemuck::try_pod_read_unaligned(self.params) {
            Ok(params) => Ok(params),
            Err(_) => Err(wrong_size(self.params.len(), size_of::<T>())),
        }
    }

    /// The number of bindings, which is the one that the kernel declares.
    #[must_use]
    pub fn bindings(&self) -> usize {
        self.bindings.len()
    }

    /// Bytes of binding `i`; 0 if it does not exist.
    #[inline]
    #[must_use]
    pub fn len(&self, i: usize) -> u64 {
        self.bindings.get(i).map_or(0, |b| b.len)
    }

    /// Returns whether binding `i` begins at a multiple of `to` bytes. `true` for an empty binding.
    #[must_use]
    pub fn is_aligned(&self, i: usize, to: u64) -> bool {
        self.bindings.get(i).is_none_or(|b| b.len == 0 || b.addr.is_multiple_of(to.max(1)))
    }

    /// Returns whether the bindings `i` and `j` share a byte. Without [`Overlap::InPlace`] or
    /// [`Overlap::Any`] only two read-only bindings can.
    #[must_use]
    pub fn overlap(&self, i: usize, j: usize) -> bool {
        match (self.bindings.get(i), self.bindings.get(j)) {
            (Some(a), Some(b)) => a.overlaps(b),
            _ => false,
        }
    }

    /// Returns whether the bindings `i` and `j` are the same range of bytes.
    #[must_use]
    pub fn same(&self, i: usize, j: usize) -> bool {
        match (self.bindings.get(i), self.bindings.get(j)) {
            (Some(a), Some(b)) => (a.addr, a.len) == (b.addr, b.len),
            _ => false,
        }
    }

    /// Returns an error if binding `i` has less than `bytes` bytes.
    ///
    /// # Errors
    /// `InvalidArgument`, which names the binding.
    #[inline]
    pub fn want(&self, i: usize, bytes: u64) -> Result<()> {
        if self.len(i) < bytes { Err(too_short(i, self.len(i), bytes)) } else { Ok(()) }
    }
}

#[cold]
fn wrong_size(bytes: usize, of: usize) -> Error {
    Error::invalid(format!("{bytes} bytes of parameters are no {of} bytes"))
}

#[cold]
fn too_short(i: usize, len: u64, bytes: u64) -> Error {
    Error::invalid(format!("binding {i} has {len} bytes, and the launch needs {bytes}"))
}

/// The function of a check.
type CheckFn = dyn Fn(&LaunchInfo<'_>) -> Result<()> + Send + Sync;

/// A rule that decides which launches of a kernel may run. Clones are the same check.
///
/// The runtime calls it before each launch, each recording and each update of a graph. Exception: a
/// grid with a zero, which runs nothing. The rule sees parameters, grid, block and the lengths of
/// the bindings. Number, access, alignment and overlap of the bindings, the size of the parameters
/// and the device's limits were checked before.
///
/// ```
/// use leasehold_hal::{KernelCheck, LaunchInfo};
/// // A tile writes 1,024 floats of binding 0.
/// let check = KernelCheck::new(|launch| launch.want(0, u64::from(launch.grid[0]) * 4096));
/// assert!(check.run(&LaunchInfo::new(([1; 3], [1; 3], 0), &[], &[])).is_err());
/// ```
#[derive(Clone)]
pub struct KernelCheck(Option<Arc<CheckFn>>);

impl KernelCheck {
    /// A check by a function, which may capture values.
    pub fn new(check: impl Fn(&LaunchInfo<'_>) -> Result<()> + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(check)))
    }

    /// Accepts every launch: the kernel is safe with any parameters, any grid and bindings of any
    /// length.
    #[must_use]
    pub const fn any() -> Self {
        Self(None)
    }

    /// Accepts every launch whose grid is `[x, 1, 1]`: for kernels that divide their work by the
    /// first index of a tile alone.
    #[must_use]
    pub fn grid_1d() -> Self {
        Self::new(|launch| match launch.grid {
            [_, 1, 1] => Ok(()),
            grid => Err(Error::invalid(format!(
                "a grid of {grid:?}; the kernel takes one of one dimension"
            ))),
        })
    }

    /// Checks a launch.
    ///
    /// # Errors
    /// The error of the check, usually `InvalidArgument`.
    #[inline]
    pub fn run(&self, launch: &LaunchInfo<'_>) -> Result<()> {
        match &self.0 {
            None => Ok(()),
            Some(check) => check(launch),
        }
    }

    /// Returns whether both are the same check: clones of one, or both [`any`](Self::any).
    #[must_use]
    pub fn same(&self, other: &Self) -> bool {
        match (&self.0, &other.0) {
            (None, None) => true,
            (Some(a), Some(b)) => Arc::ptr_eq(a, b),
            _ => false,
        }
    }
}

impl fmt::Debug for KernelCheck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "KernelCheck(a function)" } else { "KernelCheck(any)" })
    }
}

/// The rule for bindings of a launch that share memory if one of them is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Overlap {
    /// No bindings may share memory.
    #[default]
    Refused,
    /// Two bindings may be the same range, for kernels that also work in place. Partial overlap is
    /// refused.
    InPlace,
    /// Bindings may overlap in any way.
    Any,
}
