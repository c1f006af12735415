import pytest
import torch

from spes_p2p.config import OuterConfig
from spes_p2p.config.run import OUTER
from spes_p2p.optim.outer import outer_optimizer


@pytest.mark.parametrize(("lr", "momentum"), [(0.7, 0.9), (1.0, 0.5), (0.3, 0.99)])
def test_nesterov_matches_torch_sgd_over_many_rounds(seed, lr, momentum):
    torch.manual_seed(seed)
    reference = torch.nn.Parameter(torch.randn(257))
    sgd = torch.optim.SGD([reference], lr=lr, momentum=momentum, nesterov=True)
    outer = outer_optimizer(OuterConfig(optimizer="nesterov", lr=lr, momentum=momentum))
    anchor, state = reference.detach().clone(), None
    for _ in range(8):
        delta = torch.randn(257) * 0.1
        reference.grad = delta.clone()
        sgd.step()
        anchor, state = outer.step(anchor, delta, state)
        # Not bit-equal on purpose: torch may fuse product and sum, which differs by CPU.
        torch.testing.assert_close(anchor, reference.detach(), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(state, sgd.state[reference]["momentum_buffer"], rtol=1e-6, atol=1e-6)


def test_nesterov_rounds_every_operation_by_itself(seed):
    """The same bits as numpy, which never fuses: what makes peers with different CPUs agree."""
    torch.manual_seed(seed)
    anchor, delta, state = torch.randn(1003), torch.randn(1003), torch.randn(1003)
    new_anchor, new_state = outer_optimizer(OuterConfig(optimizer="nesterov")).step(anchor, delta, state)
    assert new_state is not None
    lr, momentum = torch.tensor(0.7).numpy(), torch.tensor(0.9).numpy()
    state_ref = state.numpy() * momentum + delta.numpy()
    anchor_ref = anchor.numpy() - (state_ref * momentum + delta.numpy()) * lr
    assert new_state.numpy().tobytes() == state_ref.tobytes()
    assert new_anchor.numpy().tobytes() == anchor_ref.tobytes()


def test_mean_is_the_plain_average_of_the_peers(seed):
    torch.manual_seed(seed)
    anchor, local = torch.randn(64), torch.randn(3, 64)
    outer = outer_optimizer(OuterConfig())
    new_anchor, momentum = outer.step(anchor, (anchor - local).mean(0), None)
    torch.testing.assert_close(new_anchor, local.mean(0))
    assert momentum is None and not outer.has_state


def test_nesterov_without_momentum_at_rate_one_is_the_mean(seed):
    torch.manual_seed(seed)
    anchor, delta = torch.randn(64), torch.randn(64)
    plain, _ = outer_optimizer(OuterConfig()).step(anchor, delta, None)
    nesterov, state = outer_optimizer(OuterConfig(optimizer="nesterov", lr=1.0, momentum=0.0)).step(anchor, delta, None)
    assert torch.equal(plain, nesterov) and state is not None


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("optimizer", OUTER)
def test_a_step_changes_none_of_its_arguments(seed, optimizer, first):
    torch.manual_seed(seed)
    outer = outer_optimizer(OuterConfig.model_validate({"optimizer": optimizer}))
    arguments = [torch.randn(16), torch.randn(16), torch.randn(16) if outer.has_state and not first else None]
    before = [None if vector is None else vector.clone() for vector in arguments]
    results = outer.step(*arguments)  # type: ignore[arg-type]
    assert (results[1] is not None) == outer.has_state
    for vector in results:
        if vector is not None:
            vector.fill_(7)
    for vector, old in zip(arguments, before, strict=True):
        assert (vector is None and old is None) or torch.equal(vector, old)  # type: ignore[arg-type]


@pytest.mark.parametrize("optimizer", OUTER)
def test_an_anchor_is_stepped_in_pieces_as_at_once(seed, optimizer):
    """Peers step it in pieces of other sizes, and must compute the same bits, over several rounds."""
    torch.manual_seed(seed)
    outer = outer_optimizer(OuterConfig.model_validate({"optimizer": optimizer}))
    whole: tuple[torch.Tensor, torch.Tensor | None] = torch.randn(40), None
    pieces: list[tuple[torch.Tensor, torch.Tensor | None]] = [(piece, None) for piece in whole[0].split([7, 20, 13])]
    for _ in range(3):
        delta = torch.randn(40)
        whole = outer.step(whole[0], delta, whole[1])
        parts = zip(pieces, delta.split([7, 20, 13]), strict=True)
        pieces = [outer.step(anchor, own, momentum) for (anchor, momentum), own in parts]
        assert torch.equal(torch.cat([anchor for anchor, _ in pieces]), whole[0])
    assert all((momentum is not None) == outer.has_state for _, momentum in pieces)


def test_wrong_vectors_are_our_own_bug():
    outer = outer_optimizer(OuterConfig())
    for anchor, delta, momentum in (
        (torch.zeros(3), torch.zeros(4), None),
        (torch.zeros(3), torch.zeros(3, dtype=torch.bfloat16), None),
        (torch.zeros(1, 3), torch.zeros(1, 3), None),
        (torch.zeros(3), torch.zeros(3), torch.zeros(3)),
    ):
        with pytest.raises(AssertionError):
            outer.step(anchor, delta, momentum)
