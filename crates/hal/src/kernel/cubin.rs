//! Machine code of CUDA modules.
//!
//! This module must not know a driver.

use std::borrow::Cow;
use std::fmt;

/// The machine code of a CUDA module (a cubin) for the devices of one compute capability, and for
/// those of later ones with the same major number.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Cubin<'a> {
    compute_capability: (u32, u32),
    image: Cow<'a, [u8]>,
}

impl<'a> Cubin<'a> {
    /// The machine code `image` for devices from `compute_capability` on.
    ///
    /// # Safety
    /// - `image` is a whole cubin, as NVIDIA's compiler wrote it. A driver reads as many bytes as
    ///   the image itself claims.
    pub const unsafe fn new(compute_capability: (u32, u32), image: Cow<'a, [u8]>) -> Self {
        Self { compute_capability, image }
    }

    /// The bytes.
    #[must_use]
    pub fn image(&self) -> &[u8] {
        &self.image
    }

    /// The lowest compute capability of the devices that run the code.
    #[must_use]
    pub fn compute_capability(&self) -> (u32, u32) {
        self.compute_capability
    }

    /// The same code with bytes of its own.
    #[must_use]
    pub fn into_owned(self) -> Cubin<'static> {
        let image = Cow::Owned(self.image.into_owned());
        Cubin { compute_capability: self.compute_capability, image }
    }

    /// The image of `images` for a device: of those that the device runs, the one for the highest
    /// compute capability.
    #[must_use]
    pub fn select(images: &[Self], (major, minor): (u32, u32)) -> Option<&Self> {
        images
            .iter()
            .filter(|c| c.compute_capability.0 == major && c.compute_capability.1 <= minor)
            .max_by_key(|c| c.compute_capability.1)
    }
}

impl fmt::Debug for Cubin<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (major, minor) = self.compute_capability;
        write!(f, "Cubin(sm_{major}{minor}, {} bytes)", self.image.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_gets_the_last_image_that_it_runs() {
        // SAFETY: no driver gets the image.
        let of = |capability| unsafe { Cubin::new(capability, Cow::Borrowed(&[])) };
        let images = [of((8, 6)), of((8, 0)), of((9, 0))];
        let select = |device| Cubin::select(&images, device).map(Cubin::compute_capability);
        for (device, want) in [
            ((8, 0), Some((8, 0))),
            ((8, 5), Some((8, 0))),
            ((8, 9), Some((8, 6))),
            ((9, 0), Some((9, 0))),
            ((7, 5), None),
            ((10, 0), None),
        ] {
            assert_eq!(select(device), want, "{device:?}");
        }
        assert_eq!(format!("{:?}", of((9, 0)).into_owned()), "Cubin(sm_90, 0 bytes)");
    }
}
