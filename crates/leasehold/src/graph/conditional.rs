//! Loops and branches: bodies that a graph runs as long as, or if, a flag on the device is set.
//!
//! A body is recorded by a runtime of its own, into the recording around it. Its temporaries are
//! the graph's, and their lifetime is the whole node. An eager stream has the host read the flag.
//!
//! This module must not know plans or backends.

use crate::array::ArrayView;
use crate::graph::recording::Recording;
use crate::runtime::Runtime;
use crate::stream::Stream;
use leasehold_core::{Error, Name, Result};
use leasehold_hal::ConditionalKind;

/// The flag of a loop or branch.
fn flag_of<'a>(
    flag: impl TryInto<ArrayView<'a, u32>, Error: Into<Error>>,
) -> Result<ArrayView<'a, u32>> {
    let flag = flag.try_into().map_err(Into::into)?;
    if flag.len() != 1 {
        return Err(Error::invalid(format!(
            "the flag of a loop or branch is one u32, and {} are given; take a part of one element",
            flag.len()
        )));
    }
    Ok(flag)
}

/// Loops and branches.
///
/// The flag is one `u32` that kernels, copies or fills write; other than zero means: go on. In a
/// recording the device reads it, and the host takes no part: a launch of the graph is one
/// submission, however often the body runs. On an eager stream the host reads the flag. So the call
/// blocks, and its results are those of the recording.
impl Stream {
    /// Runs the body as long as the flag is not zero, which is read before each run.
    ///
    /// The body gets the runtime that works for it. In a recording the body is called once, and
    /// what it does with that runtime is noted; no other runtime or stream of the recording can be
    /// used meanwhile. A body has launches, copies within the device, fills, library calls, loops
    /// and branches. Temporaries of the body are the graph's, and keep what they have from run to
    /// run. If the body fails, all of it is taken back, and the recording goes on.
    ///
    /// [`Graph::update`](crate::Graph::update) may replace buffers that a body uses. Launches of a
    /// body have no [`NodeId`](crate::graph::NodeId): what is to change comes from a buffer.
    ///
    /// A loop that never ends keeps its stream for ever; a simulated device finds it
    /// ([`Fault`](Error::Fault)). A [scope](crate::Name::scope), or else the flag's buffer, names
    /// the loop in reports.
    ///
    /// ```
    /// use leasehold::{DeviceId, Runtime, View};
    /// # fn main() -> leasehold::Result<()> {
    /// let runtime = Runtime::open(DeviceId::cpu(0))?;
    /// let (flag, steps) = (runtime.upload(&[1u32])?, runtime.upload(&[0u32, 1, 1, 1])?);
    /// let graph = runtime.record_graph(|recorded| {
    ///     recorded.stream().record_while(&flag, |body| {
    ///         // A real body computes its flag. This one takes it from a row of numbers.
    ///         body.stream().copy(flag.view(), steps.part(..4)?)
    ///     })
    /// })?;
    /// graph.launch()?;
    /// assert_eq!(runtime.to_vec(&flag)?, [0]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// `InvalidArgument` for a flag that is not one `u32` or is another device's. In a recording
    /// also for a body that records nothing, or that does not write the flag; `Unsupported` for
    /// what a body cannot have, for one in 64 others, and on a device without loops
    /// ([`Caps::conditionals`](leasehold_hal::Caps::conditionals)); `Occupied` while a session is
    /// open. The error of the body; the stream's cause.
    #[doc(alias("cudaGraphCondTypeWhile", "while_loop"))]
    pub fn record_while<'a>(
        &self,
        flag: impl TryInto<ArrayView<'a, u32>, Error: Into<Error>>,
        mut body: impl FnMut(&Runtime) -> Result<()>,
    ) -> Result<()> {
        let flag = flag_of(flag)?;
        if let Some(recording) = self.recording() {
            return self.record_body(recording, ConditionalKind::While, flag, body);
        }
        let runtime = Runtime::of_stream(self.clone());
        while self.is_set(flag)? {
            body(&runtime)?;
        }
        Ok(())
    }

    /// Runs the body once if the flag is not zero, and else not at all. As
    /// [`record_while`](Self::record_while), but the body need not write the flag.
    ///
    /// # Errors
    /// As [`record_while`](Self::record_while).
    #[doc(alias("cudaGraphCondTypeIf", "cond"))]
    pub fn record_if<'a>(
        &self,
        flag: impl TryInto<ArrayView<'a, u32>, Error: Into<Error>>,
        body: impl FnOnce(&Runtime) -> Result<()>,
    ) -> Result<()> {
        let flag = flag_of(flag)?;
        if let Some(recording) = self.recording() {
            return self.record_body(recording, ConditionalKind::If, flag, body);
        }
        if self.is_set(flag)? { body(&Runtime::of_stream(self.clone())) } else { Ok(()) }
    }

    /// Reads the flag; blocks.
    fn is_set(&self, flag: ArrayView<'_, u32>) -> Result<bool> {
        let mut value = [0u32];
        self.download(&mut value, flag.view())?;
        Ok(value != [0])
    }

    fn record_body(
        &self,
        recording: &Recording,
        kind: ConditionalKind,
        flag: ArrayView<'_, u32>,
        body: impl FnOnce(&Runtime) -> Result<()>,
    ) -> Result<()> {
        if !self.runtime.device.caps().conditionals {
            return Err(Error::Unsupported(
                format!(
                    "{} has no loops and branches in graphs; record the body alone, and launch it as often as the host decides",
                    self.runtime.id()
                )
                .into(),
            ));
        }
        let flag = flag.view().read();
        self.runtime.check_operands(&[flag])?;
        let name = Name::current().or_else(|| Name::from_tag(flag.view().buffer().tag()));
        let open = recording.begin_body(&flag)?;
        let stream = self.recorded_by(open.recording().clone());
        body(&Runtime::of_stream(stream))?;
        open.close(kind, name, &flag)
    }
}
