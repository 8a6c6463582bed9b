//! Registration: memory of a pool that a library of collectives maps on all ranks.
//!
//! Only whole segments of shareable memory are handed to a library. Ordinary memory consists of
//! pieces that move: a library would take it, and break later.

use crate::comm::Comm;
use crate::error::timeout;
use crate::members::Members;
use crate::window::{Part, Windows};
use leasehold::backend::sync::atomic::Ordering;
use leasehold::backend::sync::{Arc, thread};
use leasehold::{Error, Pool, Result};
use std::fmt;
use std::sync::mpsc;

/// Begins what a rank says instead of the sizes of its segments.
const REFUSED: &str = "refused: ";

/// Memory that all ranks of a communicator have registered. A drop gives it back, once the last
/// graph with calls in it is gone and its work is over. It does not block.
#[must_use = "a registration that is dropped is given back"]
pub struct Registration(Arc<Windows>);

impl Registration {
    /// Bytes that are registered.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.0.bytes()
    }
}

impl fmt::Debug for Registration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Registration({} bytes)", self.bytes())
    }
}

impl Comm {
    /// Registers the memory that a shareable pool has now. All ranks call it, in the same order,
    /// with pools that have segments of the same sizes. Blocks until all have, within the
    /// communicator's limit.
    ///
    /// Recorded all_reduces, all_gathers and reduce_scatters of up to 16 KiB use the registered
    /// memory directly, where all ranks' buffers lie at the same offsets of it and the library has
    /// such a call. So the ranks allocate the same sizes from the pool, in the same order. Whatever
    /// lies elsewhere works as without a registration, and so do eager calls and larger ones. With
    /// more than two ranks the library may add up in another order than eagerly. An update of a
    /// graph cannot give such a call another buffer.
    ///
    /// Memory that the pool gets later is not registered. Allocate first, or register again.
    ///
    /// # Errors
    /// `InvalidArgument` for a pool of another device, one without memory, and for pools whose
    /// segments differ between ranks; `Unsupported` for a library without windows: that of ranks on
    /// the CPU, and NCCL before 2.27; `Recording` for a recording's runtime; the communicator's
    /// failure; `Timeout` and `PeerLost` for a rank that does not come; the library's own.
    pub fn register(&self, pool: &Pool) -> Result<Registration> {
        let (core, runtime, registered) = self.for_registration()?;
        let (of, device) = (pool.name(), runtime.device());
        let Members { name, rank: own_rank, .. } = &*core.members;
        let foreign = (!pool.runtime().same(runtime)).then(|| {
            format!("pool {of} is not memory of {device}, the device of {name}; make a pool on the communicator's runtime")
        });
        let segments = pool.segments();
        let number = registered.made.fetch_add(1, Ordering::Relaxed);
        let sizes: Vec<String> = segments.iter().map(|s| s.bytes().to_string()).collect();
        let sizes = sizes.join(" ");
        let (members, subject) = (&core.members, format!("register/{number}"));
        // A rank that refuses its own pool says so, and the others do not wait for it.
        let own = foreign.as_ref().map_or_else(|| sizes.clone(), |why| format!("{REFUSED}{why}"));
        members.publish(&subject, own.as_bytes())?;
        if let Some(why) = foreign {
            return Err(Error::invalid(why));
        }
        let what = format!("it has not registered memory with {name}");
        for rank in members.others() {
            let theirs = members.hear(&subject, rank, &what)?;
            if let Some(why) = theirs.strip_prefix(REFUSED) {
                return Err(Error::invalid(format!("{name}: rank {rank}: {why}")));
            }
            if theirs != sizes {
                return Err(Error::invalid(format!(
                    "{name}: pool {of} has segments of [{sizes}] bytes on rank {own_rank}, and [{theirs}] on rank {rank}; allocate the same sizes on all ranks"
                )));
            }
        }
        if segments.is_empty() {
            return Err(Error::invalid(format!(
                "pool {of} has no memory to register yet; allocate buffers of a shareable pool first"
            )));
        }
        // The library waits for the other ranks, and may never come back.
        let (tell, hear) = mpsc::sync_channel(1);
        let (own, device) = (core.clone(), runtime.clone());
        thread::Builder::new().name("lh-collective".to_owned()).spawn(move || {
            let mut windows = Windows::new(own.clone(), number, Vec::new());
            let made = device.activate().map(drop).and_then(|()| {
                segments.into_iter().try_for_each(|segment| {
                    let alias = segment.alias()?;
                    let turn = own.turn.as_ref().map(|turn| turn.0.lock());
                    // SAFETY: the alias is one whole segment, which `windows` keeps until the
                    // window is given back.
                    let window =
                        unsafe { own.native.part().register(alias.addr(), alias.bytes()) }?;
                    drop(turn);
                    windows.add(Part { segment, alias, window });
                    Ok(())
                })
            });
            // Nobody hears it any more: the drop gives back what there is.
            let _ = tell.send(made.map(|()| windows));
        })?;
        let windows = hear.recv_timeout(members.limit).map_err(|_| {
            timeout(format!(
                    "{}: the library has not registered memory within {:?}; look at what the other ranks do",
                    members.name, members.limit
                ))
        })??;
        let windows = Arc::new(windows);
        registered.add(&windows);
        Ok(Registration(windows))
    }
}
