//! Typed host memory that devices copy from and to directly, and that waits by itself.
//!
//! # Why a borrow of the values is sound
//! A borrow makes the array's lease the sole one first, and waits for all uses of the memory then.
//! While it lives nobody else has a lease of the buffer or a view of it, so nobody can submit a
//! use.

use crate::runtime::{Runtime, RuntimeInner};
use crate::view::{BufferView, View};
use bytemuck::Pod;
use leasehold_alloc::{Buffer, HostKind, Layout};
use leasehold_core::sync::Arc;
use leasehold_core::{Error, Lease, PackedTimepoint, Result, UniqueLease};
use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

/// Values of one type in pinned host memory, from [`Runtime::alloc_pinned_array`].
///
/// Operations take it as they take any [`View`]: [`Stream::copy`](crate::Stream::copy) moves it to
/// the device or back without staging. [`map`](Self::map) lends the values to the host, after a
/// wait for everything that was submitted with them.
///
/// ```
/// use leasehold::prelude::*;
/// # fn main() -> Result<()> {
/// let runtime = Runtime::open(DeviceId::cpu(0))?;
/// let mut host = runtime.alloc_pinned_array::<f32>(4)?;
/// let x = runtime.alloc_array::<f32>(4)?;
/// for round in 0..3 {
///     host.map()?.fill(round as f32); // waits for the copy of the round before
///     runtime.stream().copy(x.view(), host.view())?;
/// }
/// runtime.stream().fill(x.slice(..1).view(), 9.0f32)?;
/// runtime.stream().copy(host.view(), x.view())?;
/// assert_eq!(host.map()?[..], [9.0, 2.0, 2.0, 2.0]);
/// # Ok(())
/// # }
/// ```
pub struct PinnedArray<T> {
    /// Given up while the values are lent; for good if the loan is forgotten.
    lease: Option<Lease<Buffer>>,
    len: usize,
    runtime: Arc<RuntimeInner>,
    _values: PhantomData<fn() -> T>,
}

impl Runtime {
    /// A new array of `len` values in pinned host memory, or in pageable memory on a device without
    /// pinning. The values are not specified.
    ///
    /// # Errors
    /// As [`alloc_pinned`](Self::alloc_pinned); `InvalidArgument` for more bytes than there are
    /// addresses, and for values of a stricter alignment than 256 bytes.
    pub fn alloc_pinned_array<T: Pod>(&self, len: usize) -> Result<PinnedArray<T>> {
        let bytes = crate::Array::<T>::bytes_of(len)?;
        if align_of::<T>() as u64 > Layout::new(bytes).align {
            return Err(Error::invalid(format!(
                "values aligned to {} bytes; 256 is the most",
                align_of::<T>()
            )));
        }
        let lease = self.alloc_pinned(bytes)?;
        if lease.host_kind() == HostKind::None && bytes != 0 {
            return Err(Error::Unsupported(
                "host memory that the host cannot touch; use alloc_array and transfers".into(),
            ));
        }
        Ok(PinnedArray {
            lease: Some(lease),
            len,
            runtime: self.inner.clone(),
            _values: PhantomData,
        })
    }
}

impl<T: Pod> PinnedArray<T> {
    /// The array, to whose buffer no handle leads until the values were lent.
    #[cfg(feature = "future")]
    pub(crate) fn unlisted(mut self) -> Result<Self> {
        self.lease = self.lease.take().map(Lease::unlisted).transpose()?;
        Ok(self)
    }

    /// How many values.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Blocks until everything that was submitted with the memory is over, and lends the values to
    /// the host. Work that is submitted after the loan sees what the host wrote.
    ///
    /// # Errors
    /// `Occupied` while somebody else holds a lease of the buffer: a clone that was made through a
    /// view, or a graph that copies from or to it. The cause of the last write's failure: a copy
    /// to all of the memory cures it. `InvalidState` in a host call of a
    /// stream that uses the memory.
    pub fn map(&mut self) -> Result<PinnedValues<'_, T>> {
        let lease = self.lease.take().ok_or_else(|| {
            Error::state("a loan of the values was forgotten (mem::forget); allocate another array")
        })?;
        let unique = match lease.try_unique() {
            Ok(unique) => unique,
            Err(lease) => {
                self.lease = Some(lease);
                return Err(Error::Occupied {
                    resource: "pinned array (another lease of its buffer)",
                });
            }
        };
        // The guard gives the lease back, also on an error.
        let mut values = PinnedValues { array: self, unique: Some(unique) };
        values.wait()?;
        Ok(values)
    }
}

impl<T> View for PinnedArray<T> {
    /// # Panics
    /// When a loan of the values was forgotten (`mem::forget`).
    #[track_caller]
    fn view(&self) -> BufferView<'_> {
        match &self.lease {
            Some(lease) => lease.view(),
            None => {
                panic!("a loan of the values was forgotten (mem::forget); allocate another array")
            }
        }
    }
}

impl<T> fmt::Debug for PinnedArray<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PinnedArray<{}>({} values)", std::any::type_name::<T>(), self.len)
    }
}

/// The values of a [`PinnedArray`], while the host has them.
#[must_use = "the values go back at once"]
pub struct PinnedValues<'a, T> {
    array: &'a mut PinnedArray<T>,
    /// Taken by the drop alone.
    unique: Option<UniqueLease<Buffer>>,
}

impl<T> PinnedValues<'_, T> {
    /// Waits for all uses of the memory.
    fn wait(&mut self) -> Result<()> {
        let Some(buffer) = self.unique.as_deref() else { return Ok(()) };
        let mut timepoints: Vec<PackedTimepoint> = vec![buffer.write_timepoint()];
        buffer.for_each_read(|read| timepoints.push(read));
        for point in timepoints.iter().filter_map(|timepoint| timepoint.timepoint()) {
            // Until nobody touches the memory any more, whatever became of the work.
            self.array.runtime.wait_over(point)?;
        }
        match buffer.write_timepoint().timepoint() {
            Some(write) => write.timeline().check(write.value()).map(drop),
            None => Ok(()),
        }
    }

    fn address(&self) -> *mut T {
        match self.unique.as_deref() {
            Some(buffer) if buffer.addr() != 0 => buffer.addr() as *mut T,
            _ => std::ptr::dangling_mut(),
        }
    }
}

impl<T: Pod> Deref for PinnedValues<'_, T> {
    type Target = [T];

    #[inline]
    fn deref(&self) -> &[T] {
        // SAFETY: host memory of `len` values, aligned to 256 bytes at least, as the array's
        // constructor checked. The lease is the sole one, so no use was submitted since `wait`
        // found all uses over, and none can be. Any bytes are values.
        unsafe { std::slice::from_raw_parts(self.address(), self.array.len) }
    }
}

impl<T: Pod> DerefMut for PinnedValues<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: host memory of `len` values, aligned to 256 bytes at least, as the array's
        // constructor checked. The lease is the sole one and `self` is borrowed exclusively, so
        // nobody else touches the memory. Values have no padding, so what is written is
        // initialised.
        unsafe { std::slice::from_raw_parts_mut(self.address(), self.array.len) }
    }
}

impl<T> Drop for PinnedValues<'_, T> {
    fn drop(&mut self) {
        self.array.lease = self.unique.take().map(UniqueLease::share);
    }
}

impl<T> fmt::Debug for PinnedValues<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PinnedValues({:?})", self.array)
    }
}
