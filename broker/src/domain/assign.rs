//! Assignment of the items at a queue's head to the waiting consumers.

use std::time::Duration;

use crate::domain::{ConsumerName, limits::MAX_MESSAGE_BYTES};

/// The size of an item.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ItemSize {
    /// Bytes of its payload.
    pub payload: usize,
    /// Upper bound of its size in a message.
    pub message: usize,
}

/// The demand of one waiting consumer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Demand {
    /// At most this many items, at least 1.
    pub max_items: usize,
    /// At most this many payload bytes. With `may_exceed`, a single larger item is assigned too.
    pub max_bytes: usize,
    /// True while the consumer holds nothing, so that it may receive one item of any size.
    pub may_exceed: bool,
    /// Lease of each item.
    pub lease: Duration,
    /// Name of the consumer.
    pub consumer: Option<ConsumerName>,
    /// True for the demand, the last one, that gets what is behind everything that the others can take.
    pub spare: bool,
}

/// Assigns items of the given sizes to the demands in turn. Returns the index of the demand for
/// each item. Stops at the first item that no demand can take, so that the order is kept. The items
/// of one demand fit in one message of [`MAX_MESSAGE_BYTES`], so that no item is reserved that
/// cannot be sent immediately.
///
/// If the items do not divide evenly, earlier demands get more. The caller therefore puts the least
/// loaded consumer first.
pub fn assign(sizes: &[ItemSize], demands: &[Demand]) -> Vec<usize> {
    struct Room {
        items: usize,
        bytes: usize,
        may_exceed: bool,
        message: usize,
    }
    let mut rooms: Vec<Room> = demands
        .iter()
        .map(|w| Room {
            items: w.max_items,
            bytes: w.max_bytes,
            may_exceed: w.may_exceed,
            message: 0,
        })
        .collect();
    let mut assigned = Vec::with_capacity(sizes.len());
    let mut turn = 0;
    let spare = usize::from(demands.last().is_some_and(|demand| demand.spare));
    let mut spare_began = false;
    for &size in sizes {
        let fits = |room: &Room| {
            room.items > 0
                && (size.payload <= room.bytes || room.may_exceed)
                && (room.message == 0 || room.message + size.message <= MAX_MESSAGE_BYTES)
        };
        let others = rooms.len() - spare;
        let next = (0..others).map(|step| (turn + step) % others).find(|&i| fits(&rooms[i]));
        let next = next.filter(|_| !spare_began);
        let Some(claimant) = next.or_else(|| (others..rooms.len()).find(|&i| fits(&rooms[i])))
        else {
            break;
        };
        // What comes behind is for nobody else, so that the order is kept.
        spare_began = claimant >= others;
        let room = &mut rooms[claimant];
        room.items -= 1;
        room.bytes = room.bytes.saturating_sub(size.payload);
        room.message += size.message;
        room.may_exceed = false;
        assigned.push(claimant);
        turn = claimant + 1;
    }
    assigned
}

#[cfg(test)]
mod tests {
    use super::*;

    fn want(max_items: usize, max_bytes: usize) -> Demand {
        Demand {
            max_items,
            max_bytes,
            may_exceed: true,
            lease: Duration::from_secs(1),
            consumer: None,
            spare: false,
        }
    }

    /// Assigns items with payloads of these sizes.
    fn assign(payloads: &[usize], demands: &[Demand]) -> Vec<usize> {
        let size = |&payload: &usize| ItemSize { payload, message: payload + 1_400 };
        super::assign(&payloads.iter().map(size).collect::<Vec<_>>(), demands)
    }

    #[test]
    fn items_are_assigned_in_turn() {
        let demands = [want(1, 100), want(3, 100), want(9, 100)];
        assert_eq!(assign(&[1; 7], &demands), [0, 1, 2, 1, 2, 1, 2]);
    }

    #[test]
    fn a_spare_demand_gets_what_the_others_leave() {
        let spare = Demand { spare: true, ..want(9, 100) };
        assert_eq!(assign(&[1; 5], &[want(3, 100), spare.clone()]), [0, 0, 0, 1, 1]);
        assert_eq!(assign(&[1; 2], &[want(3, 100), spare.clone()]), [0, 0]);
        assert_eq!(assign(&[1; 2], std::slice::from_ref(&spare)), [0, 0]);
        // An item that another demand could take is not handed out before one that it could not.
        let small = Demand { may_exceed: false, ..want(3, 10) };
        assert_eq!(assign(&[1, 20, 1], &[small, spare]), [0, 1, 1]);
    }

    #[test]
    fn byte_limits_hold_but_one_large_item_is_assigned() {
        let demands = [want(9, 10), want(9, 10)];
        assert_eq!(assign(&[50, 6, 6, 1], &demands), [0, 1]);
        assert_eq!(assign(&[4, 4, 4, 4, 4, 4], &demands), [0, 1, 0, 1]);
    }

    #[test]
    fn items_that_do_not_fit_in_one_message_are_not_reserved() {
        let any = usize::MAX;
        let half = MAX_MESSAGE_BYTES / 2;
        assert_eq!(assign(&[half, half], &[want(9, any)]), [0], "the envelopes count");
        assert_eq!(assign(&[half, half], &[want(9, any), want(9, any)]), [0, 1]);
        assert_eq!(assign(&[2 * half, 1], &[want(9, any)]), [0], "a large item is sent alone");
        assert_eq!(assign(&[1, 2 * half], &[want(9, any)]), [0]);
        let without_payload = assign(&vec![0; 5_000], &[want(5_000, any)]);
        assert_eq!(without_payload.len(), MAX_MESSAGE_BYTES / 1_400);
    }

    #[test]
    fn no_demand_assigns_nothing() {
        assert!(assign(&[1, 2], &[]).is_empty());
        assert!(assign(&[], &[want(1, 1)]).is_empty());
    }
}
