//! The randomness that the standard library and its users take from the system: the order of hash
//! maps, lease tokens, jitter. In a thread of a simulation it follows from the seed.
//!
//! The standard library calls `getrandom` through a weak symbol, so that a program can define its
//! own. Each simulation has a thread of its own, because a thread takes its keys only once.

use std::{cell::Cell, fs::File, io::Read};

use crate::dice::split_mix;

thread_local! {
    /// The state of the generator; `None` in threads that no simulation runs in.
    static STATE: Cell<Option<u64>> = const { Cell::new(None) };
}

/// Makes all randomness of this thread follow from the seed.
pub(crate) fn seed_thread(seed: u64) {
    // Without this reference the linker takes the system's function.
    std::hint::black_box(getrandom as *const ());
    STATE.set(Some(seed));
}

fn fill(buffer: &mut [u8]) -> bool {
    let Some(mut state) = STATE.get() else {
        return File::open("/dev/urandom").and_then(|mut file| file.read_exact(buffer)).is_ok();
    };
    for chunk in buffer.chunks_mut(8) {
        let (after, number) = split_mix(state);
        chunk.copy_from_slice(&number.to_le_bytes()[..chunk.len()]);
        state = after;
    }
    STATE.set(Some(state));
    true
}

/// Takes the place of the system's function of this name.
///
/// # Safety
/// `buffer` must be valid for `length` bytes, as for the system's function.
#[expect(unsafe_code, reason = "the standard library asks for randomness through this symbol")]
#[unsafe(no_mangle)]
unsafe extern "C" fn getrandom(buffer: *mut u8, length: usize, _flags: u32) -> isize {
    // SAFETY: the caller says that the buffer is valid; every byte is written before it is read.
    let filled = unsafe {
        buffer.write_bytes(0, length);
        fill(std::slice::from_raw_parts_mut(buffer, length))
    };
    if filled { length.cast_signed() } else { -1 }
}
