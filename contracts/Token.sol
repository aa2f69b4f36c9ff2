// SPDX-License-Identifier: Apache-2.0
pragma solidity ^0.8.24;

import {ERC20} from "@openzeppelin/contracts/token/ERC20/ERC20.sol";
import {ERC2771Context} from "@openzeppelin/contracts/metatx/ERC2771Context.sol";
import {Context} from "@openzeppelin/contracts/utils/Context.sol";

/// A token for the tests. Calls that come through the trusted forwarder count as those of the signer.
contract Token is ERC20, ERC2771Context {
    /// What `refuseWithError` reverts with.
    error Refused(uint256 code);

    /// Who called `touch` last, as the contract sees it.
    address public lastCaller;

    constructor(address forwarder, address owner, uint256 supply)
        ERC20("Test", "TEST")
        ERC2771Context(forwarder)
    {
        _mint(owner, supply);
    }

    /// Remembers the caller. Takes money too.
    function touch() external payable {
        lastCaller = _msgSender();
    }

    /// Reverts with a text.
    function refuseWithReason(string calldata reason) external pure {
        revert(reason);
    }

    /// Reverts with an error of its own.
    function refuseWithError(uint256 code) external pure {
        revert Refused(code);
    }

    function _msgSender() internal view override(Context, ERC2771Context) returns (address) {
        return ERC2771Context._msgSender();
    }

    function _msgData() internal view override(Context, ERC2771Context) returns (bytes calldata) {
        return ERC2771Context._msgData();
    }

    function _contextSuffixLength() internal view override(Context, ERC2771Context) returns (uint256) {
        return ERC2771Context._contextSuffixLength();
    }
}
