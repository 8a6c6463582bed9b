//! The simulated form of CUDA's tensor maps: the description, a mark, and the address.
//!
//! The emulator reads the same bytes. A registered function reads them by [`address`] and
//! [`TensorMap::from_params`].
//!
//! This module must not know drivers.

use leasehold_hal::TensorMap;

/// The mark of a map, and the places of mark and address.
const MARK: u16 = 0x544D;
const MARK_AT: usize = 118;
const ADDRESS_AT: usize = 120;

/// The driver's form of a map at an address.
#[must_use]
pub fn encode(addr: u64, map: &TensorMap) -> [u8; TensorMap::BYTES as usize] {
    let mut bytes = [0; TensorMap::BYTES as usize];
    bytes[..MARK_AT].copy_from_slice(&bytemuck::bytes_of(map)[..MARK_AT]);
    bytes[MARK_AT..ADDRESS_AT].copy_from_slice(&MARK.to_le_bytes());
    bytes[ADDRESS_AT..].copy_from_slice(&addr.to_le_bytes());
    bytes
}

/// The address in a driver's form; `None` for other bytes.
#[must_use]
pub fn address(native: &[u8]) -> Option<u64> {
    let native: &[u8; TensorMap::BYTES as usize] = native.try_into().ok()?;
    let address = u64::from_le_bytes(native[ADDRESS_AT..].try_into().ok()?);
    (native[MARK_AT..ADDRESS_AT] == MARK.to_le_bytes()).then_some(address)
}
