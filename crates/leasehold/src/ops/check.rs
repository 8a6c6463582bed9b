//! Checks: device memory that the host looks at in stream order, and that may fail the stream.
//!
//! A look is a copy to host memory of its own, and a host call behind it. Nobody else reaches that
//! memory. In a graph each launch copies again, and comes after the launch before.
//!
//! This module must not know kernels. One that looks at many values leaves a few for the host.

use crate::array::ArrayView;
use crate::stream::Stream;
use crate::view::{BufferView, View};
use leasehold_alloc::{HostKind, Layout, On};
use leasehold_core::error::Text;
use leasehold_core::{Error, Finding, Result, UniqueLease};

/// Checks in stream order.
impl Stream {
    /// Shows device memory to a function of the host, in stream order: the bytes as they are after
    /// the earlier work, whatever writes them later. Does not block. An error or a panic of the
    /// function poisons the stream from here on. In a recording: every launch of the graph looks
    /// again, and one that fails poisons its stream from that launch on.
    ///
    /// [`expect`](Self::expect) is such a look. The function runs as one of a
    /// [`host_call`](Self::host_call). The cost is a copy to the host and a host call: on CUDA
    /// later work of the stream is given to the driver after the function has returned. So look at
    /// a few bytes, once in a step.
    ///
    /// ```
    /// use leasehold::{DeviceId, Error, Finding, Runtime, View};
    /// # fn main() -> leasehold::Result<()> {
    /// let runtime = Runtime::open(DeviceId::cpu(0))?;
    /// let stream = runtime.create_stream()?;
    /// let norm = runtime.upload(&[1e9f32])?;
    /// stream.inspect("norm", norm.view(), |bytes| match bytemuck::pod_read_unaligned(bytes) {
    ///     norm @ 0.0f32..=1e3 => Ok(()),
    ///     norm => Err(Finding::new("norm", 0, norm.into()).into()),
    /// })?;
    /// assert!(matches!(stream.synchronize(), Err(Error::Check(finding)) if finding.value == 1e9));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// `InvalidArgument` for no bytes, and for memory of another device; `OutOfMemory` for host
    /// memory; `Unsupported` on a device without host calls; the stream's cause. After an error
    /// the function is never called.
    pub fn inspect(
        &self,
        name: &'static str,
        bytes: BufferView<'_>,
        look: impl Fn(&[u8]) -> Result<()> + Send + Sync + 'static,
    ) -> Result<()> {
        if bytes.is_empty() {
            return Err(Error::invalid(format!(
                "{name} looks at no bytes; give the part of a buffer that holds the values"
            )));
        }
        self.can_call()?;
        self.runtime.check_operands(&[bytes.read()])?;
        let on = On { timeline: self.under().timeline, source: self.under().source() };
        let host = self.runtime.pinned()?.alloc_unique(Layout::new(bytes.len()), on)?;
        // No handle leads to it.
        let host = UniqueLease::share_unlisted(host);
        if host.host_kind() == HostKind::None {
            return Err(Error::Unsupported(
                format!("{} has no memory that the host can read", self.runtime.id()).into(),
            ));
        }
        if let Some(recording) = self.recording() {
            recording.own(&host)?;
        }
        let seen = host.clone();
        let call = move || {
            // SAFETY: host memory, which the lease keeps. Only the copy below writes it, and this
            // call comes after that copy and before the copy of the graph's next launch.
            look(unsafe {
                std::slice::from_raw_parts(seen.addr() as *const u8, seen.len() as usize)
            })
        };
        self.copy_pinned(host.view(), bytes)?;
        self.host_call(name, call)
    }

    /// Expects a `u32` of one element, which kernels write, to be other than zero. Does not block.
    /// A zero poisons the stream from here on, with [`Error::Check`] and the name. The context
    /// lives, and other streams go on. In a recording: each launch of the graph checks, and one
    /// that finds a zero poisons its stream from that launch on.
    ///
    /// The cost is that of [`inspect`](Self::inspect).
    ///
    /// ```
    /// use leasehold::{DeviceId, Error, Runtime};
    /// # fn main() -> leasehold::Result<()> {
    /// let runtime = Runtime::open(DeviceId::cpu(0))?;
    /// let sorted = runtime.upload(&[1u32, 0])?;
    /// let stream = runtime.create_stream()?;
    /// stream.expect(sorted.slice(..1), "rows are sorted")?;
    /// stream.synchronize()?;
    /// stream.expect(sorted.slice(1..), "columns are sorted")?;
    /// let error = stream.synchronize().unwrap_err();
    /// assert!(matches!(&error, Error::Check(finding) if finding.name == "columns are sorted"));
    /// // The next stream works.
    /// runtime.create_stream()?.expect(sorted.slice(..1), "rows are sorted")?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// `InvalidArgument` for a view of other than one element; as [`inspect`](Self::inspect).
    #[doc(alias("_assert_async", "device_assert"))]
    pub fn expect<'a>(
        &self,
        flag: impl TryInto<ArrayView<'a, u32>, Error: Into<Error>>,
        name: impl Into<Text>,
    ) -> Result<()> {
        let (flag, name) = (flag.try_into().map_err(Into::into)?, name.into());
        if flag.len() != 1 {
            return Err(Error::invalid(format!(
                "check {name}: a flag is one u32, and {} are given; take a part of one element",
                flag.len()
            )));
        }
        self.inspect("expect", flag.view(), move |bytes| match bytes {
            [0, 0, 0, 0] => Err(Finding::new(name.clone(), 0, 0.0).into()),
            _ => Ok(()),
        })
    }
}
