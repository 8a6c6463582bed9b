//! The errors of this crate, from their texts.

use leasehold::Error;

macro_rules! errors {
    ($($name:ident = $kind:ident,)*) => {
        $(
            #[cold]
            pub(crate) fn $name(why: impl Into<String>) -> Error {
                Error::$kind(why.into().into())
            }
        )*
    };
}
errors! {
    timeout = Timeout,
    unsupported = Unsupported,
    unavailable = Unavailable,
    not_found = NotFound,
}

/// A rank that is lost.
#[cold]
pub(crate) fn lost(rank: u32, why: impl Into<String>) -> Error {
    Error::PeerLost { rank, why: why.into().into() }
}
